"""What a failure ends, and that nobody is left waiting."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import replace

import pytest

from draftsmith.drafters.target.target import Target
from draftsmith.errors import UserError
from draftsmith.serve.config import EngineConfig
from draftsmith.serve.engine.build import build_engine
from draftsmith.serve.engine.engine import EngineCore
from draftsmith.serve.engine.live_draft import Swap, SwapLate
from draftsmith.serve.engine.loop import (
    MOST_FAILURES,
    MOST_LONE_FAILURES,
    EngineDead,
    EngineLoop,
    ShuttingDown,
)
from draftsmith.serve.engine.scheduler import QueueFull
from draftsmith.serve.http.errors import as_refusal
from draftsmith.serve.requests.request import FinishReason, Request, Update
from draftsmith.serve.sampling.params import SamplingParams
from draftsmith.text_stream import TextStream
from tests.waiting import wait_until

PARAMS = SamplingParams(temperature=0.0, max_tokens=30, ignore_eos=True)
PATIENCE_S = 20.0


class Reader:
    """Waits for the end of one request."""

    def __init__(self) -> None:
        self.done = threading.Event()
        self.reasons: list[FinishReason] = []

    def __call__(self, request: Request, update: Update) -> None:
        if update.finish_reason is not None:
            self.reasons.append(update.finish_reason)
            self.done.set()

    def reason(self) -> FinishReason:
        assert self.done.wait(PATIENCE_S), "nobody told the end of the request"
        assert len(self.reasons) == 1
        return self.reasons[0]


@pytest.fixture
def make_loop(target: Target) -> Iterator[Callable[..., EngineLoop]]:
    loops: list[EngineLoop] = []

    def make(*, start: bool = True, **options: int) -> EngineLoop:
        loops.append(EngineLoop(build_engine(target, None, EngineConfig(compile="off", **options))))
        return loops[-1].start() if start else loops[-1]

    yield make
    for loop in loops:
        loop.close()


def ask(loop: EngineLoop, params: SamplingParams = PARAMS) -> Reader:
    reader = Reader()
    loop.submit([5, 6, 7], params, reader)
    return reader


def failing(engine: EngineCore, monkeypatch: pytest.MonkeyPatch, times: int) -> None:
    """The target's next `times` passes raise."""
    passes, left = engine.runner.run, [times]

    def run(*arguments: object) -> object:
        if left[0] > 0:
            left[0] -= 1
            raise RuntimeError("out of memory")
        return passes(*arguments)

    monkeypatch.setattr(engine.runner, "run", run)


def test_a_reader_that_fails_loses_its_own_request_alone(
    make_loop: Callable[..., EngineLoop],
) -> None:
    loop = make_loop()

    def broken(request: Request, update: Update) -> None:
        raise RuntimeError("Event loop is closed")

    lost = loop.submit([5, 6], PARAMS, broken)
    assert ask(loop).reason() is FinishReason.LENGTH
    assert lost.finish_reason is FinishReason.ABORT and lost.num_output < 30
    assert loop.healthy and loop.failures == 0
    assert ask(loop).reason() is FinishReason.LENGTH


def test_a_round_that_fails_ends_its_requests_and_not_those_that_wait(
    make_loop: Callable[..., EngineLoop], monkeypatch: pytest.MonkeyPatch
) -> None:
    loop = make_loop(start=False, max_batch=1)
    failing(loop.engine, monkeypatch, 1)
    first, second = ask(loop), ask(loop)
    loop.start()
    assert (first.reason(), second.reason()) == (FinishReason.ERROR, FinishReason.LENGTH)
    assert loop.healthy and loop.failures == 0
    blocks = loop.engine.scheduler.blocks
    assert blocks.usage == 0.0


def test_an_engine_that_keeps_failing_tells_everybody_and_takes_nobody(
    make_loop: Callable[..., EngineLoop], monkeypatch: pytest.MonkeyPatch
) -> None:
    loop = make_loop(start=False, max_batch=1)
    failing(loop.engine, monkeypatch, 10**9)
    readers = [ask(loop) for _ in range(MOST_FAILURES + 3)]
    loop.start()
    assert {reader.reason() for reader in readers} == {FinishReason.ERROR}
    wait_until(lambda: not loop.healthy)
    with pytest.raises(EngineDead, match="restart the server") as error:
        ask(loop)
    assert as_refusal(error.value).status == 503
    with pytest.raises(UserError, match="has stopped"):
        loop.swap("nowhere", "1")


def unreadable(monkeypatch: pytest.MonkeyPatch, chosen: Callable[[str], bool]) -> None:
    """Text of an answer whose stop string is `chosen` raises."""
    push = TextStream.push

    def broken(stream: TextStream, tokens: list[int]) -> object:
        if chosen(stream.stop[0]):
            raise OverflowError("out of range integral type conversion attempted")
        return push(stream, tokens)

    monkeypatch.setattr(TextStream, "push", broken)


BAD, GOOD = (replace(PARAMS, max_tokens=4, stop=(stop,)) for stop in ("!bad!", "!good!"))


def test_what_fails_for_every_request_alone_ends_the_engine(
    make_loop: Callable[..., EngineLoop], monkeypatch: pytest.MonkeyPatch
) -> None:
    """As of a tokenizer that fails whatever the text: no round raises, yet nobody is served."""
    unreadable(monkeypatch, lambda stop: True)
    loop = make_loop()
    for _ in range(MOST_LONE_FAILURES):
        assert loop.healthy
        assert ask(loop, BAD).reason() is FinishReason.ERROR
    assert loop.failures == 0
    wait_until(lambda: not loop.healthy)
    with pytest.raises(EngineDead, match="restart the server"):
        ask(loop, GOOD)


@pytest.mark.parametrize("between", ["an answer", "a bias"])
def test_what_fails_for_some_requests_does_not(
    between: str, make_loop: Callable[..., EngineLoop], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Others are answered between them, or what the requests ask of their tokens may be what
    raises."""
    unreadable(monkeypatch, lambda stop: stop == "!bad!")
    loop = make_loop()
    for _ in range(2 * MOST_LONE_FAILURES):
        bad = replace(BAD, logit_bias=((9, 1.0),)) if between == "a bias" else BAD
        assert ask(loop, bad).reason() is FinishReason.ERROR
        if between == "an answer":
            assert ask(loop, GOOD).reason() is FinishReason.LENGTH
    assert loop.healthy and loop.failures == 0


def test_a_request_that_comes_while_the_loop_closes_is_refused_or_ended(
    make_loop: Callable[..., EngineLoop],
) -> None:
    """Many clients against one shutdown, over and over: whoever was let in hears of the end."""
    for attempt in range(10):
        loop, let_in, refused = make_loop(), [], []

        def clients(
            loop: EngineLoop = loop, let_in: list[Reader] = let_in, refused: list[bool] = refused
        ) -> None:
            while not refused:
                try:
                    let_in.append(ask(loop, SamplingParams(temperature=0.0, max_tokens=2)))
                except ShuttingDown:
                    refused.append(True)
                except QueueFull:
                    time.sleep(0.001)

        threads = [threading.Thread(target=clients) for _ in range(3)]
        for thread in threads:
            thread.start()
        time.sleep(0.002 * attempt)
        loop.close()
        for thread in threads:
            thread.join(PATIENCE_S)
        assert refused and all(reader.reason() is not FinishReason.ERROR for reader in let_in)


class Swaps:
    """Stands in for the engine's own loading: any folder is a set of no weights."""

    def __init__(self, engine: EngineCore, monkeypatch: pytest.MonkeyPatch):
        self.made: list[Swap] = []
        monkeypatch.setattr(engine.draft, "prepare", self.prepare)
        self.engine = engine

    def prepare(self, folder: str, version: str) -> Swap:
        swap = Swap(version, [])
        self.made.append(swap)
        self.engine.draft.swaps.append(swap)
        return swap


def test_a_swap_given_up_never_lands(
    make_loop: Callable[..., EngineLoop], monkeypatch: pytest.MonkeyPatch
) -> None:
    loop = make_loop(start=False)
    swaps = Swaps(loop.engine, monkeypatch)
    with pytest.raises(SwapLate, match="version 7"):
        loop.swap("folder", "7", timeout_s=0.05)
    loop.start()
    assert loop.swap("folder", "8").version == "8"
    assert loop.engine.stats.draft_version == "8" and loop.engine.stats.num_swaps == 1
    assert swaps.made[0].applied.cancelled()


def test_a_copy_that_fails_is_told_and_ends_no_request(
    make_loop: Callable[..., EngineLoop], monkeypatch: pytest.MonkeyPatch
) -> None:
    loop = make_loop()
    Swaps(loop.engine, monkeypatch)

    def fail(swap: Swap) -> float:
        raise RuntimeError("the device is full")

    monkeypatch.setattr("draftsmith.serve.engine.live_draft.apply_swap", fail)
    reader = ask(loop)
    with pytest.raises(UserError, match="the device is full"):
        loop.swap("folder", "9")
    assert reader.reason() is FinishReason.LENGTH
    assert loop.engine.stats.num_swaps == 0 and loop.engine.stats.num_swaps_refused == 1
