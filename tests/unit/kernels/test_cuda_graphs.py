"""Capturing by stand-ins of torch's CUDA calls: the device, the stream, and what a failed capture
leaves behind."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch

from draftsmith.kernels.cuda_graphs import CountedCapturer, CudaCapturer


class Device:
    """As the library behaves: an invalidated capture throws when it is ended, before it has given
    its pool back, nobody may empty the cache while a pool is being filled, and nothing is captured
    into a pool whose graphs are gone."""

    def __init__(self) -> None:
        self.device, self.stream = 0, "caller"
        self.streams: list[int] = []  # device of each one made
        self.filling: list[Any] = []  # pools of captures that have not ended
        self.released: list[Any] = []
        self.invalid = False
        self.pools = 0  # handles given out
        self.graphs: dict[Any, weakref.WeakSet[Any]] = {}  # by pool
        self.ran_on: list[tuple[int, str]] = []  # of `work`

    def handle(self) -> tuple[int, int]:
        self.pools += 1
        return 0, 6 + self.pools

    def work(self, *, forbidden: bool = False) -> torch.Tensor:
        self.ran_on.append((self.device, self.stream))
        if forbidden and self.filling:
            self.invalid = True
            raise RuntimeError("operation not permitted when stream is capturing")
        return torch.ones(2)


@pytest.fixture
def cuda(monkeypatch: pytest.MonkeyPatch) -> Device:
    state = Device()

    class Stream:
        def __init__(self, device: torch.device):
            state.streams.append(device.index)

        def wait_stream(self, other: object) -> None:
            pass

    class Caller(Stream):
        def __init__(self) -> None:
            pass

    class Graph:
        def capture_begin(self, *, pool: object, capture_error_mode: str) -> None:
            assert not state.filling, "the pool of an earlier capture was not given back"
            assert (state.stream, capture_error_mode) == ("own", "thread_local")
            assert state.graphs.get(pool) is None or len(state.graphs[pool]), "use_count > 0"
            state.graphs.setdefault(pool, weakref.WeakSet()).add(self)
            state.filling, state.invalid = [pool], False

        def capture_end(self) -> None:
            assert state.stream == "own", "a capture ends on the stream it began on"
            if state.invalid:
                raise RuntimeError("capture was invalidated")
            state.filling.clear()

    @contextmanager
    def on(field: str, value: object) -> Iterator[None]:
        before = getattr(state, field)
        setattr(state, field, value)
        try:
            yield
        finally:
            setattr(state, field, before)

    def empty_cache() -> None:
        assert not state.filling, "captures_underway is not empty"

    for name, value in {
        "Stream": Stream,
        "CUDAGraph": Graph,
        "current_device": lambda: state.device,
        "current_stream": Caller,
        "device": lambda device: on("device", device.index),
        "stream": lambda stream: on("stream", "own"),
        "graph_pool_handle": state.handle,
        "synchronize": lambda: None,
        "empty_cache": empty_cache,
    }.items():
        monkeypatch.setattr(torch.cuda, name, value)
    calls = {
        "_cuda_endAllocateToPool": lambda device, pool: state.filling.remove(pool),
        "_cuda_releasePool": lambda device, pool: state.released.append((device, pool)),
    }
    for name, call in calls.items():
        monkeypatch.setattr(torch._C, name, call, raising=False)
    return state


def test_stream_pool_and_runs_are_on_the_tensors_device(cuda: Device) -> None:
    capturer = CudaCapturer(torch.device("cuda:1"))
    capturer.capture(cuda.work)
    assert cuda.streams == [1]  # one for warm-up and capture
    assert cuda.ran_on == [(1, "own")] * 3
    assert (cuda.device, cuda.stream) == (0, "caller")


def test_the_current_device_where_none_is_named(cuda: Device) -> None:
    cuda.device = 2
    CudaCapturer().capture(cuda.work)
    assert cuda.ran_on == [(2, "own")] * 3


def test_a_failed_capture_does_not_spoil_the_next(cuda: Device) -> None:
    capturer = CudaCapturer(torch.device("cuda:1"))
    with pytest.raises(RuntimeError, match="not permitted"):
        capturer.capture(lambda: cuda.work(forbidden=True))
    assert (cuda.device, cuda.stream, cuda.filling) == (0, "caller", [])
    assert cuda.released == [(1, (0, 7))]
    torch.cuda.empty_cache()
    _, output = capturer.capture(cuda.work)
    assert output.tolist() == [1, 1]


def test_an_error_that_leaves_the_capture_valid_ends_it(cuda: Device) -> None:
    def run() -> None:
        if cuda.filling:
            raise torch.OutOfMemoryError("no room")

    capturer = CudaCapturer(torch.device("cuda:0"))
    with pytest.raises(torch.OutOfMemoryError):
        capturer.capture(run)
    assert (cuda.filling, cuda.released) == ([], [])
    capturer.capture(cuda.work)


def test_a_capture_that_was_invalidated_quietly_is_told(cuda: Device) -> None:
    def run() -> None:
        cuda.invalid = bool(cuda.filling)

    capturer = CudaCapturer(torch.device("cuda:0"))
    with pytest.raises(RuntimeError, match="invalidated"):
        capturer.capture(run)
    capturer.capture(cuda.work)


@pytest.mark.long
def test_the_pool_outlives_the_callers_graphs(cuda: Device) -> None:
    capturer = CudaCapturer(torch.device("cuda:0"))
    for _ in range(3):
        capturer.capture(cuda.work)  # whose graph is gone at once
        gc.collect()
    assert list(cuda.graphs) == [(0, 7)]


def test_counts_of_captures_and_failures() -> None:
    class Fake:
        def capture(self, run):
            return object(), run()

    def fail(error: Exception) -> None:
        raise error

    counted = CountedCapturer(Fake())
    counted.capture(lambda: None)
    with pytest.raises(torch.OutOfMemoryError):
        counted.capture(lambda: fail(torch.OutOfMemoryError("no room")))
    assert (counted.num_graphs, counted.broken) == (1, False)
    with pytest.raises(RuntimeError):
        counted.capture(lambda: fail(RuntimeError("it reads a value")))
    assert (counted.num_graphs, counted.broken) == (1, True)
