"""The next batch is looked at, never taken, and asked for once the one before was read."""

from __future__ import annotations

from typing import Any

import torch

from draftsmith.drafters.interface import TextBatch
from draftsmith.train.objective.ahead import AheadSource, Peekable
from draftsmith.train.objective.teacher import TargetSignals


def test_looking_ahead_takes_nothing() -> None:
    found = Peekable(iter(range(3)))
    assert found.peek() == found.peek() == [0]
    assert [next(found), found.peek(), next(found), next(found)] == [0, [1], 1, 2]
    assert found.peek() == [] and list(found) == []


def batch(number: int) -> TextBatch:
    ids = torch.full((1, 2), number)
    return TextBatch(
        input_ids=ids,
        attention_mask=torch.ones_like(ids),
        weights=torch.ones(1, 2),
    )


class Source:
    def __init__(self, events: list[str]):
        self.events = events

    def read(self, text: TextBatch, taps: tuple[int, ...]) -> TargetSignals:
        self.events.append(f"read {int(text.input_ids[0, 0])}")
        return TargetSignals(None, None)  # type: ignore[arg-type]

    def expect(self, ids: torch.Tensor, *unused: Any) -> None:
        self.events.append(f"expect {int(ids[0, 0])}")


def test_the_batch_after_the_one_that_was_read_is_asked_for() -> None:
    events: list[str] = []
    source = Source(events)
    ahead = AheadSource(source, source.expect)
    ahead.announce([batch(0), batch(1), batch(2)])
    for number in (0, 1):
        ahead.read(batch(number), ())
    ahead.announce([batch(2)])  # the last step of a run
    for number in (2, 3):
        ahead.read(batch(number), ())
    assert events == ["read 0", "expect 1", "read 1", "expect 2", "read 2", "read 3"]
