"""Text and updates may come while the next pass runs; what they say does not depend on it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from draftsmith.drafters.target.target import Target
from draftsmith.serve.config import EngineConfig
from draftsmith.serve.engine.build import build_engine
from draftsmith.serve.requests.request import FinishReason, Request, Update
from draftsmith.serve.sampling.params import SamplingParams

PROMPTS = [[5, 60, 7, 200, 9, 33], [9, 9, 41], [77, 12, 5, 8]]


def play(
    target: Target, drafter: Any, *, overlaps: bool, stop: tuple[str, ...], cancel_after: int
) -> list[tuple]:
    """All updates of three requests, one of them cancelled on the way."""
    engine = build_engine(target, drafter, EngineConfig(k=2, num_blocks=64, block_size=8))
    engine.committer.overlaps = overlaps
    told: dict[str, list[Update]] = {}
    requests = []

    def note(request: Request, update: Update) -> None:
        told.setdefault(request.id, []).append(update)
        assert request.speculation.num_committed == request.num_output  # counted before

    for index, prompt in enumerate(PROMPTS):
        params = SamplingParams(
            temperature=1.0, seed=index, max_tokens=9, ignore_eos=True, stop=stop, logprobs=1
        )
        requests.append(engine.submit(prompt, params, note))
    for number in range(100):
        if number == cancel_after:
            engine.cancel(requests[2])
        if not engine.step():
            break
    assert all(request.finished for request in requests)
    for request in requests:
        updates = told[request.id]
        assert request.text == "".join(update.text for update in updates)
        assert request.output == [token for update in updates for token in update.tokens]
        assert [update.finish_reason for update in updates[:-1]] == [None] * (len(updates) - 1)
    stats = engine.stats
    assert stats.num_generation_tokens == sum(request.num_output for request in requests)
    counts = (stats.acceptance, stats.by_context, stats.offered, stats.num_accepted_tokens)
    return [
        (told[one.id], one.text, one.finish_reason, one.speculation, counts) for one in requests
    ]


@pytest.mark.parametrize("stop", [(), ("e",)])
@pytest.mark.parametrize("cancel_after", [2, 100])
def test_what_is_told_does_not_depend_on_when(
    target: Target, fixed_drafter: Callable[..., Any], stop: tuple[str, ...], cancel_after: int
) -> None:
    at_once, later = (
        play(target, fixed_drafter(), overlaps=overlaps, stop=stop, cancel_after=cancel_after)
        for overlaps in (False, True)
    )
    assert at_once == later
    reasons = [one[2] for one in later]
    # The stop string ends the third request before it would be cancelled.
    assert (
        FinishReason.STOP in reasons
        if stop
        else (FinishReason.ABORT in reasons) == (cancel_after == 2)
    )


@pytest.mark.parametrize("overlaps", [False, True])
def test_a_rounds_updates_come_while_the_next_pass_runs_and_the_last_at_once(
    target: Target, overlaps: bool
) -> None:
    engine = build_engine(target, None, EngineConfig(num_blocks=64, block_size=8))
    engine.committer.overlaps = overlaps
    events: list[str] = []
    run = engine.runner.run

    def launched(*given: Any) -> Any:
        events.append("pass")
        return run(*given)

    engine.runner.run = launched

    def told(request: Request, update: Update) -> None:
        events.append("last update" if update.finish_reason else "update")

    engine.submit(PROMPTS[0], SamplingParams(temperature=0.0, max_tokens=3, ignore_eos=True), told)
    while engine.scheduler.busy:
        engine.step()
    in_turn = ["pass", "update", "pass", "update", "pass", "last update"]
    overlapped = ["pass", "pass", "update", "pass", "update", "last update"]
    assert events == (overlapped if overlaps else in_turn)
