from __future__ import annotations

import random

import pytest

from draftsmith.serve.cache.blocks import BlockManager
from draftsmith.serve.config import EngineConfig
from draftsmith.serve.control.auto import AutoControl
from draftsmith.serve.control.control import Control, RoundResult, RowResult
from draftsmith.serve.engine.scheduler import Schedule, ScheduledRow, Scheduler
from draftsmith.serve.requests.request import FinishReason, Request
from draftsmith.serve.sampling.params import SamplingParams


def make_request(name: str, prompt: int, max_tokens: int, k: int = 0) -> Request:
    return Request(
        id=name,
        tokens=[7] * prompt,
        num_prompt=prompt,
        params=SamplingParams(),
        seed=0,
        k=k,
        max_tokens=max_tokens,
    )


def make_scheduler(
    *, num_blocks: int = 64, block_size: int = 4, control: Control | None = None, **limits: int
) -> Scheduler:
    limits = {"max_batch": 4, "max_round_tokens": 32, "max_queue": 100, **limits}
    return Scheduler(BlockManager(num_blocks, block_size), EngineConfig(**limits), control=control)


def play(scheduler: Scheduler, schedule: Schedule, accepted: random.Random) -> None:
    """What the engine does to requests after a round."""
    for row in schedule.rows:
        kept = accepted.randint(0, row.k)
        row.request.cache.computed += row.count + kept
        if row.samples:
            row.request.tokens += [7] * min(kept + 1, row.request.remaining)
            if row.request.remaining == 0:
                row.request.finish_reason = FinishReason.LENGTH
                scheduler.remove(row.request)


def observe(scheduler: Scheduler, schedule: Schedule, *, accepting: bool) -> int:
    """Tells the control of a round whose time is known; returns the k that was drafted."""
    k = max((row.k for row in schedule.drafting), default=0)
    num_tokens = sum(row.count for row in schedule.rows)
    if schedule.num_deciding:
        offers = [RowResult("", row.k, row.k if accepting else 0) for row in schedule.drafting]
        seconds = 0.01 + 0.002 * k + 1e-5 * num_tokens
        scheduler.control.observe(
            RoundResult(schedule.plan, num_tokens, schedule.num_deciding, k, seconds, False, offers)
        )
    return k


def test_prompts_are_fed_in_pieces_beside_decoding_rows() -> None:
    scheduler = make_scheduler(max_round_tokens=10)
    short, long = make_request("short", 3, 20, k=2), make_request("long", 25, 5)
    scheduler.add(short)
    scheduler.add(long)
    always = random.Random(0)
    first = scheduler.schedule()
    assert [(row.request.id, row.count) for row in first.rows] == [("short", 3), ("long", 7)]
    play(scheduler, first, always)
    second = scheduler.schedule()
    assert second.drafting == [ScheduledRow(short, 3, 1, 2)]
    assert second.filling == [ScheduledRow(long, 7, 7)]  # 10 less the 3 tokens of the verify row
    play(scheduler, second, always)
    play(scheduler, scheduler.schedule(), always)
    fourth = scheduler.schedule()
    assert fourth.sampling == [ScheduledRow(long, 21, 4)] and fourth.sampling[0].samples


def test_the_latest_arrival_is_preempted_and_comes_back_first() -> None:
    scheduler = make_scheduler(num_blocks=7, block_size=4)  # 24 tokens
    first, second, third = (make_request(name, 7, 12) for name in ("first", "second", "third"))
    for request in (first, second, third):
        scheduler.add(request)
    always = random.Random(0)
    while not first.finished:
        schedule = scheduler.schedule()
        assert first in scheduler.running
        play(scheduler, schedule, always)
    assert second.num_preemptions > 0 and first.num_preemptions == 0
    assert second.cache.computed == 0 or second in scheduler.running
    order = []
    while scheduler.busy:
        play(scheduler, scheduler.schedule(), always)
        order += [r.id for r in (second, third) if r.finished and r.id not in order]
    assert order == ["second", "third"]


def test_the_last_token_is_not_drafted_for() -> None:
    scheduler = make_scheduler()
    request = make_request("r", 2, 3, k=4)
    scheduler.add(request)
    play(scheduler, scheduler.schedule(), random.Random(0))
    assert scheduler.schedule().drafting[0].k == 1  # two tokens are left: one drafted, one bonus


@pytest.mark.parametrize("num_waiting", [0, 5])
def test_k_follows_what_pays_while_the_pool_is_full(num_waiting: int) -> None:
    """Four requests hold every block but a few; the head of the queue is expected each round and
    never fits."""
    scheduler = make_scheduler(
        num_blocks=4 * 20 + 1,
        block_size=16,
        max_batch=8,
        max_round_tokens=512,
        control=AutoControl(),
    )
    for index in range(4 + num_waiting):
        scheduler.add(make_request(str(index), 250, 100_000, k=8))

    def drafting(rounds: int, *, accepting: bool) -> float:
        count = 0
        for _ in range(rounds):
            schedule = scheduler.schedule()
            for row in schedule.rows:
                # Texts stay as long as they are, so that the pool stays as full as it is.
                row.request.tokens += [7] * (row.samples and row.request.num_output == 0)
                row.request.cache.computed = (
                    row.begin + row.count if row.count > 1 else row.request.num_tokens - 1
                )
            count += observe(scheduler, schedule, accepting=accepting) > 0
        return count / rounds

    drafting(500, accepting=False)
    assert len(scheduler.running) == 4 and len(scheduler.waiting) == num_waiting
    assert drafting(1000, accepting=False) < 0.1
    drafting(2000, accepting=True)
    assert drafting(500, accepting=True) > 0.9
