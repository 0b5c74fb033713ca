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
    target: Target,
    drafter: Any,
    *,
    overlaps: bool,
    stop: tuple[str, ...],
    cancel_after: int,
    logprobs: int | None,
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
            temperature=1.0, seed=index, max_tokens=9, ignore_eos=True, stop=stop, logprobs=logprobs
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
@pytest.mark.parametrize("drafts", [True, False])
def test_what_is_told_does_not_depend_on_when(
    target: Target,
    fixed_drafter: Callable[..., Any],
    stop: tuple[str, ...],
    cancel_after: int,
    drafts: bool,
) -> None:
    """Without drafts rounds are launched ahead, too."""
    drafter = fixed_drafter() if drafts else None
    options: dict[str, Any] = {"stop": stop, "logprobs": 1 if drafts else None}
    at_once, later = (
        play(target, drafter, overlaps=overlaps, cancel_after=cancel_after, **options)
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


def answers(target: Target, drafter: Any, *, overlaps: bool, values: dict[str, Any]) -> list[tuple]:
    """Tokens and ends of requests that come, are cancelled, change their k and end as rounds go
    by, in a batch of three with too few blocks for all."""
    config = EngineConfig(k=2, max_batch=3, num_blocks=17, block_size=4, max_length=40)
    engine = build_engine(target, drafter, config)
    engine.committer.overlaps = overlaps
    requests: list[Request] = []

    def submit(index: int) -> None:
        params = SamplingParams(max_tokens=8 + 5 * (index % 3), k=0, seed=index, **values)
        requests.append(engine.submit(PROMPTS[index % 3], params))

    actions: dict[int, Callable[[], None]] = {
        3: lambda: engine.cancel(requests[1]),
        5: lambda: submit(3),
        8: lambda: engine.set_k(requests[2], 2),
        9: lambda: submit(4),
        12: lambda: engine.set_k(requests[2], 0),
    }
    for index in range(3):
        submit(index)
    if values["temperature"] > 0:
        # Where drafts begin decides what a seed draws.
        del actions[8], actions[12]
    for number in range(100):
        if number in actions:
            actions[number]()
        if not engine.step() and number > max(actions):
            break
    assert engine.scheduler.blocks.usage == 0
    return [(one.output, one.finish_reason, one.speculation.num_committed) for one in requests]


@pytest.mark.parametrize(
    "values",
    [{"temperature": 0.0}, {"temperature": 1.0, "ignore_eos": True}],
    ids=["greedy", "sampled"],
)
def test_rounds_launched_ahead_give_the_same_answers_whatever_comes_between(
    target: Target, fixed_drafter: Callable[..., Any], values: dict[str, Any]
) -> None:
    in_turn, ahead = (
        answers(target, fixed_drafter(), overlaps=overlaps, values=values)
        for overlaps in (False, True)
    )
    assert ahead == in_turn
    assert {reason for _, reason, _ in ahead} >= {FinishReason.ABORT, FinishReason.LENGTH}
