"""A learner that meets a buffer of recorded traffic all at once: with `learn.most_fresh` each
request is used in an update of its own size, without it one update is made of all."""

from __future__ import annotations

import io
import threading
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from draftsmith.distill.buffer.buffer import BufferWriter
from draftsmith.distill.buffer.traffic import ServedText
from draftsmith.distill.config import DriftConfig, GateConfig, LearnConfig
from draftsmith.distill.learn.learner import Learner
from draftsmith.record import RoundRecord
from tests.integration.conftest import learner_of
from tests.round_records import round_record

NUM_REQUESTS, FRESH = 30, 4
SHARD = 7  # records


def record(number: int) -> RoundRecord:
    return round_record(
        request=f"r{number}", time_s=float(number), position=4, context=[5, 6, 7, 8 + number],
        drafted=[9, 9], accepted=1, committed=[9, 11], last=True,
    )  # fmt: skip


@pytest.fixture
def learned(
    loop: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> Callable[..., list[list[str]]]:
    """`learned(most_fresh=4)` are the requests of each update of a learner that runs until the
    buffer is read; its reservoir holds fewer than the buffer."""
    config = loop().config
    writer = BufferWriter(config.buffer, flush_records=SHARD)
    for number in range(NUM_REQUESTS):
        writer.put(record(number))
    writer.close()
    (Path(config.buffer) / f"{0:013d}-torn-{0:08d}.parquet").write_bytes(b"PAR1")

    def run(*, most_fresh: int | None) -> list[list[str]]:
        updates: list[list[str]] = []
        update = Learner.update

        def noted(self: Learner, fresh: Sequence[ServedText], *rest: Any) -> Any:
            updates.append([text.request for text in fresh])
            return update(self, fresh, *rest)

        monkeypatch.setattr(Learner, "update", noted)
        learn = LearnConfig(fresh=FRESH, most_fresh=most_fresh, reservoir=8, steps=1, replay=0)
        drift = DriftConfig(patience=0)
        asked = replace(config, learn=learn, drift=drift, gate=GateConfig(), until_idle_s=0.0)
        daemon = learner_of(asked, io.StringIO())
        read = daemon.reader.read

        def when_due(**limits: Any) -> Any:
            assert most_fresh is None or len(daemon.track.fresh) < FRESH
            found = read(**limits)
            assert most_fresh is None or len(found.records) <= SHARD
            return found

        monkeypatch.setattr(daemon.reader, "read", when_due)
        daemon.loop(threading.Event())
        held_out = daemon.counters.held_out
        assert daemon.counters.damaged_shards == 1
        assert 0 < held_out < NUM_REQUESTS / 2
        used = [request for one in updates for request in one]
        assert len(used) == len(set(used)) == daemon.counters.texts
        if most_fresh is not None:
            assert len(used) == NUM_REQUESTS - held_out
        return updates

    return run


def test_each_recorded_request_gets_its_update(learned: Callable[..., list[list[str]]]) -> None:
    sizes = [len(one) for one in learned(most_fresh=FRESH)]
    assert len(sizes) > 4 and set(sizes[:-1]) == {FRESH} and 0 < sizes[-1] <= FRESH


def test_without_a_bound_one_update_takes_the_newest(
    learned: Callable[..., list[list[str]]],
) -> None:
    (only,) = learned(most_fresh=None)
    assert len(only) == 8 and f"r{NUM_REQUESTS - 1}" in only
