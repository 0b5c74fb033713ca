"""The scheduler with a prefix cache under any order of arrivals, forks, cancels and preemptions, on
a pool of make-believe."""

from __future__ import annotations

import random
from collections import Counter

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from draftsmith.serve.cache.blocks import BlockManager
from draftsmith.serve.cache.prefix import PrefixCache
from draftsmith.serve.config import EngineConfig
from draftsmith.serve.engine.scheduler import ScheduledRow, Scheduler
from draftsmith.serve.requests.request import FinishReason, Request
from draftsmith.serve.sampling.params import SamplingParams


class Taps(list):
    """Stands for a tensor of taps: can be cut and copied."""

    def __getitem__(self, index):
        found = super().__getitem__(index)
        return Taps(found) if isinstance(index, slice) else found

    def clone(self) -> Taps:
        return Taps(self)


def make_request(name: str, prompt: list[int], max_tokens: int, k: int) -> Request:
    return Request(
        id=name,
        tokens=list(prompt),
        num_prompt=len(prompt),
        params=SamplingParams(),
        seed=0,
        k=k,
        max_tokens=max_tokens,
    )


class Engine:
    """What both models would write at a position is the text it depends on, so that a read shows
    whether it is right."""

    def __init__(
        self,
        *,
        num_blocks: int,
        block_size: int,
        ahead: int,
        needs_taps: bool,
        max_tapped: int | None = None,
    ):
        self.size, self.ahead, self.needs_taps = block_size, ahead, needs_taps
        blocks = BlockManager(num_blocks, block_size)
        self.prefix = PrefixCache(
            blocks, root="target", ahead=ahead, needs_taps=needs_taps, max_tapped=max_tapped
        )
        config = EngineConfig(max_batch=4, max_round_tokens=9, max_queue=1000)
        self.scheduler = Scheduler(blocks, config, prefix=self.prefix)
        self.target_pool: dict[int, tuple[int, ...]] = {}
        self.draft_pool: dict[int, tuple[int, ...]] = {}
        self.num_hit = 0

    def step(self, chance: random.Random) -> None:
        schedule = self.scheduler.schedule()
        assert schedule.rows or not self.scheduler.busy
        for row in schedule.rows:
            self.num_hit += row.begin if row.request.cache.num_stored == 0 else 0
            drafts = row in schedule.drafting and chance.random() < 0.7
            if drafts:
                self.draft(row)
            kept = chance.randint(0, row.k) if drafts else 0
            self.run(row, kept, chance)
            if drafts:
                self.advance(row)
            request = row.request
            if row.samples:
                emitted = (
                    [chance.randint(0, 2) for _ in range(kept + 1)]
                    if kept == 0
                    else [*self.accepted, chance.randint(0, 2)]
                )
                request.tokens += emitted[: request.remaining]
            self.prefix.store(request)
            if request.remaining == 0:
                self.end(request, FinishReason.LENGTH)

    def end(self, request: Request, reason: FinishReason) -> None:
        request.finish_reason = reason
        request.draft.taps.clear()
        self.scheduler.remove(request)

    def run(self, row: ScheduledRow, kept: int, chance: random.Random) -> None:
        """The target reads everything before its tokens and writes them and the drafts, of which
        the first `kept` are right."""
        request = row.request
        for position in range(row.begin):
            assert self.target_pool[self.slot(request, position)] == tuple(
                request.tokens[: position + 1]
            )
        drafts = [chance.randint(0, 2) for _ in range(row.k)]
        self.accepted = drafts[:kept]
        text = request.tokens[: row.begin + row.count] + drafts
        for position in range(row.begin, len(text)):
            self.write(self.target_pool, request, position, tuple(text[: position + 1]))
        request.cache.computed += row.count + kept
        if self.needs_taps and request.k > 0:
            request.draft.taps.append(
                Taps(tuple(text[: p + 1]) for p in range(row.begin, row.begin + row.count + kept))
            )

    def draft(self, row: ScheduledRow) -> None:
        request = row.request
        for position in range(request.draft.cached):
            assert self.draft_pool[self.slot(request, position)] == tuple(
                request.tokens[: position + 1 + self.ahead]
            )
        if self.needs_taps:
            taps = [tap for taps in request.draft.taps for tap in taps]
            assert taps == [
                tuple(request.tokens[: p + 1])
                for p in range(request.draft.cached, request.num_tokens - 1)
            ]
            # Without a new state there is nothing to draft from.
            assert taps
        for position in range(request.draft.cached, request.num_tokens - self.ahead):
            self.write(
                self.draft_pool,
                request,
                position,
                tuple(request.tokens[: position + 1 + self.ahead]),
            )

    def advance(self, row: ScheduledRow) -> None:
        request, cached = row.request, row.begin + row.count - self.ahead
        surplus = cached - request.draft.cached
        request.draft.cached = cached
        if self.needs_taps:
            left = [tap for taps in request.draft.taps for tap in taps][surplus:]
            request.draft.taps[:] = [Taps(left)] if left else []

    def write(
        self,
        pool: dict[int, tuple[int, ...]],
        request: Request,
        position: int,
        value: tuple[int, ...],
    ) -> None:
        slot, block = self.slot(request, position), request.blocks[position // self.size]
        # What the target wrote for several owners is never written again. The draft may, and
        # whoever reads finds out.
        assert pool is self.draft_pool or self.scheduler.blocks.references(block) == 1
        pool[slot] = value

    def slot(self, request: Request, position: int) -> int:
        return request.blocks[position // self.size] * self.size + position % self.size

    def check(self) -> None:
        blocks, running = self.scheduler.blocks, self.scheduler.running
        held = Counter(block for request in running for block in request.blocks)
        assert len(running) <= 4 and len({request.slot for request in running}) == len(running)
        for request in running:
            assert len(set(request.blocks)) == len(request.blocks) and 0 not in request.blocks
        for block in range(1, blocks.num_blocks):
            assert blocks.references(block) == held[block]
        assert blocks.num_free + len(held) == blocks.num_usable
        tapped = {key for key, entry in self.prefix._entries.items() if entry.taps is not None}
        assert tapped == set(self.prefix._tapped)
        assert self.prefix.max_tapped is None or len(tapped) <= self.prefix.max_tapped
        for request in self.scheduler.waiting:
            assert (
                request.blocks == []
                and request.cache.computed == request.draft.cached == 0
                and not request.draft.taps
            )


class AnyOrder(RuleBasedStateMachine):
    @initialize(
        num_blocks=st.integers(9, 30),
        block_size=st.integers(1, 4),
        ahead=st.integers(0, 1),
        taps=st.booleans(),
        seed=st.integers(),
        max_tapped=st.none() | st.integers(0, 6),
    )
    def start(
        self,
        num_blocks: int,
        block_size: int,
        ahead: int,
        taps: bool,
        seed: int,
        max_tapped: int | None,
    ) -> None:
        # Taps without reading ahead do not occur: who reads the state at t beside the token at t +
        # 1 needs both.
        self.engine = Engine(
            num_blocks=num_blocks,
            block_size=block_size,
            ahead=ahead,
            needs_taps=taps and ahead == 1,
            max_tapped=max_tapped,
        )
        self.room = (num_blocks - 1) * block_size
        self.chance, self.requests = random.Random(seed), []

    @rule(base=st.integers(0, 2), length=st.integers(1, 16), tail=st.lists(st.integers(0, 2), max_size=3), most=st.integers(1, 8),
          k=st.integers(0, 3), copies=st.integers(1, 3))  # fmt: skip
    def arrive(
        self, base: int, length: int, tail: list[int], most: int, k: int, copies: int
    ) -> None:
        prompt = ([base, 1, 2, 0] * 4)[:length] + tail
        prompt = prompt[: self.room - 1]
        for _ in range(copies):
            request = make_request(
                str(len(self.requests)), prompt, min(most, self.room - len(prompt)), k
            )
            self.requests.append(request)
            self.engine.scheduler.add(request)

    @rule(times=st.integers(1, 4))
    def step(self, times: int) -> None:
        for _ in range(times):
            self.engine.step(self.chance)

    @precondition(lambda self: any(not request.finished for request in self.requests))
    @rule(data=st.data())
    def cancel(self, data: st.DataObject) -> None:
        alive = [request for request in self.requests if not request.finished]
        self.engine.end(data.draw(st.sampled_from(alive)), FinishReason.ABORT)

    @precondition(lambda self: self.engine.scheduler.running)
    @rule()
    def preempt(self) -> None:
        self.engine.scheduler.preempt(self.engine.scheduler.running[-1])

    @invariant()
    def conserved(self) -> None:
        self.engine.check()

    def teardown(self) -> None:
        for _ in range(60 * len(self.requests) + 1):
            if self.engine.scheduler.busy:
                self.engine.step(self.chance)
                self.engine.check()
        assert all(request.finished for request in self.requests), "a request starved"
        assert self.engine.scheduler.blocks.num_free == self.engine.scheduler.blocks.num_usable


AnyOrder.TestCase.settings = settings(max_examples=60, stateful_step_count=30, deadline=None)
test_any_order_of_events_keeps_every_block_right = AnyOrder.TestCase


def serve(engine: Engine, request: Request) -> int:
    """Tokens the request found cached."""
    engine.scheduler.add(request)
    engine.num_hit = 0
    while not request.finished:
        engine.step(random.Random(0))
    return engine.num_hit


def test_hits_are_whole_blocks_and_leave_something_to_compute() -> None:
    engine = Engine(num_blocks=30, block_size=4, ahead=0, needs_taps=False)
    text = [1, 2, 0, 1, 1, 0, 2, 2]
    assert serve(engine, make_request("a", text, 1, 0)) == 0
    # its last token's distribution is still to be computed
    assert serve(engine, make_request("b", text, 1, 0)) == 4
    assert serve(engine, make_request("c", [*text, 1], 1, 0)) == 8
    assert serve(engine, make_request("d", [2, *text], 1, 0)) == 0
    assert serve(engine, make_request("e", [*text[:6], 0, 0, 0], 1, 0)) == 4


def test_a_block_is_shared_only_before_the_same_token_when_the_draft_reads_ahead() -> None:
    engine = Engine(num_blocks=30, block_size=4, ahead=1, needs_taps=True)
    text = [1, 2, 0, 1, 1, 0, 2, 2, 1, 1, 1]
    assert serve(engine, make_request("a", text, 1, 0)) == 0
    assert serve(engine, make_request("b", [*text[:8], 1, 0], 1, 0)) == 8
    assert serve(engine, make_request("c", [*text[:8], 0, 0], 1, 0)) == 4


def test_the_least_recently_used_text_goes_first_and_its_end_before_its_beginning() -> None:
    engine = Engine(num_blocks=9, block_size=4, ahead=0, needs_taps=False)
    first, second = [0] * 13, [1] * 13
    for index, text in enumerate((first, second, first)):
        serve(engine, make_request(str(index), text, 1, 0))
    # four of eight blocks, of which two were never used
    serve(engine, make_request("large", [2] * 15, 1, 0))
    assert serve(engine, make_request("again", first, 1, 0)) == 12
    assert serve(engine, make_request("older", second, 1, 0)) == 4


@pytest.mark.parametrize("computed, found", [(3, 0), (4, 4), (7, 4), (8, 8)])
def test_a_block_is_found_only_when_its_last_token_was_read(computed: int, found: int) -> None:
    """The newest token of a request is known a round before the target has read it."""
    blocks = BlockManager(16, 4)
    prefix = PrefixCache(blocks, root="target")
    request = make_request("a", list(range(10)), 4, 0)
    assert blocks.grow(request.blocks, 10)
    request.cache.computed = computed
    prefix.store(request)
    assert prefix.num_found(make_request("b", list(range(10)), 4, 0)) == found
