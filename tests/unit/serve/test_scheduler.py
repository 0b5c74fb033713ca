from __future__ import annotations

import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from draftsmith.serve.blocks import BlockManager
from draftsmith.serve.request import FinishReason, Request, SamplingParams
from draftsmith.serve.scheduler import QueueFull, Row, Schedule, Scheduler


def make_request(name: str, prompt: int, max_tokens: int, k: int = 0) -> Request:
    return Request(id=name, tokens=[7] * prompt, num_prompt=prompt, params=SamplingParams(), seed=0, k=k, max_tokens=max_tokens)


def make_scheduler(*, num_blocks: int = 64, block_size: int = 4, **limits: int) -> Scheduler:
    return Scheduler(BlockManager(num_blocks, block_size), **{"max_batch": 4, "max_round_tokens": 32, "max_queue": 100, **limits})


def play(scheduler: Scheduler, schedule: Schedule, accepted: random.Random) -> None:
    """What the engine does to requests after a round."""
    for row in schedule.rows:
        kept = accepted.randint(0, row.k)
        row.request.computed += row.count + kept
        if row.samples:
            row.request.tokens += [7] * min(kept + 1, row.request.remaining)
            if row.request.remaining == 0:
                row.request.finish_reason = FinishReason.LENGTH
                scheduler.remove(row.request)


def check(scheduler: Scheduler, schedule: Schedule) -> None:
    rows = schedule.rows
    assert len({id(row.request) for row in rows}) == len(rows) <= scheduler.max_batch
    held: list[int] = []
    for request in scheduler.running:
        held += request.blocks
        assert 0 <= request.slot < scheduler.max_batch
    assert len(held) == len(set(held)) == scheduler.blocks.num_usable - scheduler.blocks.num_free
    for request in scheduler.waiting:
        assert request.blocks == [] and request.computed == 0 and request.slot == -1
    for row in rows:
        assert row.begin == row.request.computed and row.count >= 1
        assert len(row.request.blocks) * scheduler.blocks.block_size >= row.begin + row.count + row.k
        assert row.request in scheduler.running
    prompt_tokens = sum(row.count for row in rows if row.count > 1)
    assert prompt_tokens <= max(scheduler.max_round_tokens, scheduler.blocks.block_size)


@settings(max_examples=150, deadline=None)
@given(
    sizes=st.lists(st.tuples(st.integers(1, 20), st.integers(1, 12), st.integers(0, 5)), min_size=1, max_size=12),
    num_blocks=st.integers(9, 40),
    max_batch=st.integers(1, 5),
    max_round_tokens=st.integers(1, 40),
    seed=st.integers(0, 1000),
)
def test_every_request_finishes_and_no_block_is_shared_or_lost(
    sizes: list[tuple[int, int, int]], num_blocks: int, max_batch: int, max_round_tokens: int, seed: int
) -> None:
    scheduler = make_scheduler(num_blocks=num_blocks, max_batch=max_batch, max_round_tokens=max_round_tokens)
    requests = [make_request(str(i), prompt, most, k) for i, (prompt, most, k) in enumerate(sizes)]
    arrivals, accepted = list(requests), random.Random(seed)
    for _ in range(2000):
        if arrivals and accepted.random() < 0.5:
            scheduler.add(arrivals.pop(0))
        if not arrivals and not scheduler.busy:
            break
        schedule = scheduler.schedule()
        check(scheduler, schedule)
        assert schedule.rows or not scheduler.busy
        play(scheduler, schedule, accepted)
    assert all(request.num_output == request.max_tokens for request in requests)
    assert scheduler.blocks.num_free == scheduler.blocks.num_usable


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
    assert second.drafting == [Row(short, 3, 1, 2)]
    assert second.filling == [Row(long, 7, 7)]  # 10 less the 3 tokens of the verify row
    play(scheduler, second, always)
    play(scheduler, scheduler.schedule(), always)
    fourth = scheduler.schedule()
    assert fourth.sampling == [Row(long, 21, 4)] and fourth.sampling[0].samples


def test_the_latest_arrival_is_preempted_and_comes_back_first() -> None:
    scheduler = make_scheduler(num_blocks=7, block_size=4)  # 24 tokens
    first, second, third = (make_request(name, 7, 12) for name in ("first", "second", "third"))
    for request in (first, second, third):
        scheduler.add(request)
    always = random.Random(0)
    while not first.finished:
        schedule = scheduler.schedule()
        check(scheduler, schedule)
        assert first in scheduler.running
        play(scheduler, schedule, always)
    assert second.num_preemptions > 0 and first.num_preemptions == 0
    assert second.computed == 0 or second in scheduler.running
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


def test_cancel_frees_a_running_and_a_waiting_request() -> None:
    scheduler = make_scheduler(max_batch=1)
    running, waiting = make_request("running", 8, 4), make_request("waiting", 8, 4)
    scheduler.add(running)
    scheduler.add(waiting)
    scheduler.schedule()
    scheduler.remove(waiting)
    scheduler.remove(running)
    scheduler.remove(running)
    assert not scheduler.busy and scheduler.blocks.num_free == scheduler.blocks.num_usable


def test_a_full_queue_refuses() -> None:
    scheduler = make_scheduler(max_queue=1)
    scheduler.add(make_request("a", 1, 1))
    with pytest.raises(QueueFull, match="later"):
        scheduler.add(make_request("b", 1, 1))
