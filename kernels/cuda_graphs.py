"""CUDA graphs: work captured once and launched again with one call, and the numbers of rows that
are worth a graph of their own."""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol, TypeVar

import torch

Output = TypeVar("Output")

_WARM_UPS = 2  # runs before a capture: kernels are compiled and libraries take their workspace


class Graph(Protocol):
    def replay(self) -> None: ...


class Capturer(Protocol):
    def capture(self, run: Callable[[], Output]) -> tuple[Graph, Output]:
        """A graph of `run`, and the tensors its replays write. It is run, too: what it reads must
        allow that."""
        ...


class CudaCapturer:
    """All graphs share one memory pool: they never run at the same time, and their outputs are used
    up before the next runs."""

    def __init__(self) -> None:
        self._memory = torch.cuda.graph_pool_handle()

    def capture(self, run: Callable[[], Output]) -> tuple[Graph, Output]:
        stream = torch.cuda.Stream()
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            for _ in range(_WARM_UPS):
                run()
        torch.cuda.current_stream().wait_stream(stream)
        graph = torch.cuda.CUDAGraph()
        # A version may be loading on another thread, which is none of the capture's business.
        with torch.cuda.graph(graph, pool=self._memory, capture_error_mode="thread_local"):
            output = run()
        return graph, output


def row_buckets(max_batch: int) -> list[int]:
    """Powers of two and the numbers half way, and beyond the batch one row for padding."""
    return [*sizes_up_to(max_batch), max_batch + 1]


def sizes_up_to(most: int) -> list[int]:
    powers = [2**exponent for exponent in range(most.bit_length())]
    return sorted(
        {size for power in powers for size in (power, power + power // 2) if size <= most} | {most}
    )
