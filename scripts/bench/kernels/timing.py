"""Time and peak memory of one call, on a GPU or a CPU, and the copy bandwidth that bounds what only
moves bytes."""

from __future__ import annotations

import gc
import os
import statistics
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch

MEBIBYTE = 1 << 20
# Larger than any cache, so that no run finds its inputs where the one before left them.
COLD_BYTES = 512 * MEBIBYTE
COPY_BYTES = {"cuda": 1024 * MEBIBYTE, "cpu": 128 * MEBIBYTE}


class Timing(NamedTuple):
    median_ms: float
    low_ms: float  # of the middle 80 % of the runs
    high_ms: float
    runs: int
    peak_mib: float  # most that was held at once, beyond what was there before


class Stopwatch:
    """`budget_s` is spent on the runs of each call, at least `LEAST` of them."""

    LEAST = 5

    def __init__(self, device: torch.device, budget_s: float):
        self.device, self.budget_s = device, budget_s
        self.cold = (
            torch.empty(COLD_BYTES // 4, device=device, dtype=torch.int32)
            if device.type == "cuda"
            else None
        )

    def measure(self, call: Callable[[], Any]) -> Timing:
        for _ in range(3 if self.device.type == "cuda" else 1):
            call()
        peak_mib = self._peak_bytes(call) / MEBIBYTE
        times_ms: list[float] = []
        begun_s = time.perf_counter()
        while len(times_ms) < self.LEAST or time.perf_counter() - begun_s < self.budget_s:
            times_ms.append(self._once_ms(call))
        times_ms.sort()
        edge = len(times_ms) // 10
        return Timing(
            statistics.median(times_ms),
            times_ms[edge],
            times_ms[-1 - edge],
            len(times_ms),
            peak_mib,
        )

    def _once_ms(self, call: Callable[[], Any]) -> float:
        if self.cold is None:
            begun_s = time.perf_counter()
            call()
            return 1e3 * (time.perf_counter() - begun_s)
        begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        self.cold.zero_()
        begin.record()
        call()
        end.record()
        end.synchronize()
        return begin.elapsed_time(end)

    def _peak_bytes(self, call: Callable[[], Any]) -> int:
        gc.collect()
        if self.device.type != "cuda":
            return _peak_bytes_cpu(call)
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        call()
        torch.cuda.synchronize()
        return torch.cuda.max_memory_allocated() - before


def _peak_bytes_cpu(call: Callable[[], Any]) -> int:
    """Peak bytes of torch's allocator, from the profiler's record of allocations and frees."""
    with (
        quiet_stderr(),
        torch.profiler.profile(
            activities=[torch.profiler.ProfilerActivity.CPU], profile_memory=True
        ) as profile,
    ):
        call()
    held = peak = 0
    events = [
        event for event in profile.profiler.kineto_results.events() if event.name() == "[memory]"
    ]
    for event in sorted(events, key=lambda event: event.start_ns()):
        held += event.nbytes()
        peak = max(peak, held)
    return peak


@contextmanager
def quiet_stderr() -> Iterator[None]:
    """The profiler's library writes lines of its own there, whatever its log level."""
    kept, nowhere = os.dup(2), os.open(os.devnull, os.O_WRONLY)
    os.dup2(nowhere, 2)
    try:
        yield
    finally:
        os.dup2(kept, 2)
        os.close(kept)
        os.close(nowhere)


def copy_bandwidth(stopwatch: Stopwatch) -> float:
    """Bytes read and written per second by the plainest kernel there is."""
    source = torch.empty(
        COPY_BYTES[stopwatch.device.type], dtype=torch.uint8, device=stopwatch.device
    )
    target = torch.empty_like(source)
    source.fill_(1)
    timing = stopwatch.measure(lambda: target.copy_(source))
    return 2 * source.numel() / (timing.median_ms / 1e3)
