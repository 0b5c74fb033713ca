"""Rounds of an engine with random weights, with and without a draft: milliseconds, phases, what the
device is busy with, and the share of a round in which the target's weights could be read. What a
draft brings is not measured; acceptance is given where it matters."""

from __future__ import annotations

import statistics
import time
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
from torch.profiler import ProfilerActivity, profile

from draftsmith.drafters.target.target import Target
from draftsmith.serve.config import EngineConfig
from draftsmith.serve.engine.build import build_engine
from draftsmith.serve.engine.engine import EngineCore
from draftsmith.serve.engine.proposal import RoundProposal
from draftsmith.serve.engine.round import RowSampling
from draftsmith.serve.engine.verify import Rule, by_chain
from draftsmith.serve.requests.request import Request, RequestOptions
from draftsmith.serve.sampling.params import SamplingParams
from draftsmith.serve.stats import PHASES
from draftsmith.serve.warm_up import warm_up
from scripts.bench.device.report import Report, free_memory
from scripts.bench.device.shapes import random_draft, random_target

# Calls of the driver and of torch's runtime that put work on the device.
LAUNCHES = ("cudaLaunchKernel", "cudaLaunchKernelExC", "cuLaunchKernel", "cuLaunchKernelEx", "cudaGraphLaunch", "cudaMemcpyAsync", "cudaMemsetAsync")  # fmt: skip
KERNELS_SHOWN = 24
UNREAD = RequestOptions(text=False)  # there is no tokenizer
K = 3
# Chances by depth with which tau is 2 and 3 at three drafted tokens.
RATES = {"tau 2": (0.5437, 0.5437, 0.5437), "tau 3": (0.8105, 0.8105, 0.8105)}


class Machine(NamedTuple):
    device: torch.device
    copy_bytes_s: float  # read and written


class Work(NamedTuple):
    streams: tuple[int, ...]
    temperatures: tuple[float, ...]
    prompt: int
    settle: int  # rounds behind the prompts, before anything is measured
    timed: int
    counted: int  # rounds under the profiler

    def smaller(self) -> Work:
        return Work(self.streams[:2], self.temperatures, 6, 2, 3, 2)


PLAIN = Work((1, 8, 32), (0.0, 1.0), 512, 30, 300, 20)
DRAFTED = PLAIN._replace(timed=200)
PUBLISHED = Work((1,), (0.0,), 32, 10, 110, 10)  # Llama 1B, prompt of 32, 128 tokens


def plain(report: Report, item: str, machine: Machine, size: str, work: Work = PLAIN) -> None:
    target = random_target(size, machine.device)
    report.note(item, size=size, reading_ms=1e3 * weight_bytes(target) / machine.copy_bytes_s)
    measure(report, item, target, None, work)


def drafted(report: Report, item: str, machine: Machine, size: str, work: Work = DRAFTED) -> None:
    """EAGLE-3 as it drafts by random weights (nothing is kept), then with given acceptance."""
    target = random_target(size, machine.device)
    report.note(item, size=size, reading_ms=1e3 * weight_bytes(target) / machine.copy_bytes_s)
    measure(report, item, target, random_draft(target), work)
    given = work._replace(streams=work.streams[:1], temperatures=(0.0,))
    for name, rates in RATES.items():
        free_memory()
        target = random_target(size, machine.device)  # what was captured stays captured
        measure(report, item, target, random_draft(target), given, rates=rates, prefix=f"{name}, ")


def weight_bytes(target: Target) -> int:
    """Bytes that a pass reads at least: of an input embedding with a head of its own, nothing."""
    model = target.model
    every = sum(one.numel() * one.element_size() for one in model.parameters())
    embedding = model.get_input_embeddings().weight
    if model.get_output_embeddings().weight is embedding:
        return every
    return every - embedding.numel() * embedding.element_size()


def measure(
    report: Report,
    item: str,
    target: Target,
    draft: torch.nn.Module | None,
    work: Work,
    *,
    rates: tuple[float, ...] | None = None,
    prefix: str = "",
) -> None:
    if not torch.cuda.is_available():
        work = work.smaller()
    prefill = 2 * max(work.streams)  # rounds at most: each reads a whole prompt or two halves
    rounds_ahead = prefill + work.settle + work.timed + 3 * work.counted
    config = EngineConfig(
        k=K,
        max_batch=max(work.streams),
        max_length=work.prompt + (K + 1) * rounds_ahead + 8,
        prefix_cache=False,
    )
    begun_s = time.perf_counter()
    engine = build_engine(target, draft, config)
    if rates is not None:
        engine.rule = kept_at(torch.tensor(rates, device=target.device))
    warm_up(engine)
    report.note(item, **{f"{prefix}warm_up_s": round(time.perf_counter() - begun_s, 2)})
    for temperature in work.temperatures:
        for streams in work.streams:
            name = f"{prefix}T={temperature:g}, {streams} streams"
            report.note(item, **{name: rounds(engine, work, streams, temperature)})
    if torch.cuda.is_available():
        report.note(item, **{f"{prefix}peak_bytes": torch.cuda.max_memory_allocated()})
        torch.cuda.reset_peak_memory_stats()


def kept_at(rates: torch.Tensor) -> Rule:
    """Verification of one greedy stream that keeps drafts with these chances by depth, [K]."""

    def rule(
        logits: torch.Tensor, proposal: RoundProposal | None, sampling: RowSampling
    ) -> torch.Tensor:
        if proposal is not None:
            size = min(proposal.sizes[0], len(rates))
            kept = torch.rand_like(rates[:size]) < rates[:size]
            depths = torch.arange(size, device=rates.device)
            found = torch.where(kept, 1e4, -1e4).to(logits.dtype)
            logits[depths, proposal.tokens[0, :size]] = found
        return by_chain(logits, proposal, sampling)

    return rule


def rounds(engine: EngineCore, work: Work, streams: int, temperature: float) -> dict[str, Any]:
    requests = decoding(engine, work, streams, temperature)
    tokens, before = sum(one.num_tokens for one in requests), dict(engine.stats.time_s)
    times_ms = [timed_ms(engine.step) for _ in range(work.timed)]
    phases = {
        name: 1e3 * (engine.stats.time_s[name] - before[name]) / work.timed for name in PHASES
    }
    committed = sum(one.num_tokens for one in requests) - tokens
    times_ms.sort()
    edge = len(times_ms) // 10
    found = {
        "ms": round(statistics.median(times_ms), 4),
        "ms_low": round(times_ms[edge], 4),
        "ms_high": round(times_ms[-1 - edge], 4),
        "tokens_s": round(1e3 * committed / sum(times_ms), 1),
        "phases_ms": {name: round(value, 4) for name, value in phases.items()},
        "waits": waits(engine.step, work.counted),
        **busy(engine.step, work.counted),
        "graphs_ms": graph_times_ms(engine.step),
    }
    for request in requests:
        engine.cancel(request)
    return found


def decoding(engine: EngineCore, work: Work, streams: int, temperature: float) -> list[Request]:
    """Requests that have been read and some rounds more."""
    params = SamplingParams(
        temperature=temperature, max_tokens=engine.max_length - work.prompt, ignore_eos=True
    )
    vocab_size = engine.target.vocab_size
    requests = [
        engine.submit(
            [(7 * row + at) % vocab_size for at in range(work.prompt)], params, options=UNREAD
        )
        for row in range(streams)
    ]
    while any(request.num_tokens <= work.prompt for request in requests):
        engine.step()
    for _ in range(work.settle):
        engine.step()
    return requests


def timed_ms(step: Callable[[], object]) -> float:
    """Milliseconds of a round, which ends with the wait for its result."""
    begun_s = time.perf_counter()
    step()
    return 1e3 * (time.perf_counter() - begun_s)


def busy(step: Callable[[], object], count: int) -> dict[str, Any]:
    """A round's launches, and by kernel the time in which the device is busy."""
    activities = [ProfilerActivity.CPU]
    if torch.cuda.is_available():
        activities.append(ProfilerActivity.CUDA)
    with profile(activities=activities) as seen:
        for _ in range(count):
            step()
    events = seen.key_averages()
    kernels = sorted(
        (event for event in events if event.self_device_time_total > 0),
        key=lambda event: -event.self_device_time_total,
    )
    return {
        "launches": sum(event.count for event in events if event.key in LAUNCHES) / count,
        "busy_ms": round(sum(one.self_device_time_total for one in kernels) / count / 1e3, 4),
        "kernels": [
            {
                "name": one.key[:80],
                "us": round(one.self_device_time_total / count, 2),
                "calls": one.count / count,
            }
            for one in kernels[:KERNELS_SHOWN]
        ],
    }


def graph_times_ms(step: Callable[[], object], repeats: int = 30) -> list[float]:
    """Milliseconds of every graph that a round replays, in its order, each alone. What they write
    is lost, so that this comes last."""
    with noted_replays() as graphs:
        step()
    found = []
    for graph in graphs:
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        begin.record()
        for _ in range(repeats):
            graph.replay()
        end.record()
        end.synchronize()
        found.append(round(begin.elapsed_time(end) / repeats, 4))
    return found


@contextmanager
def noted_replays() -> Iterator[Sequence[torch.cuda.CUDAGraph]]:
    own, seen = torch.cuda.CUDAGraph.replay, list[torch.cuda.CUDAGraph]()

    def replay(graph: torch.cuda.CUDAGraph) -> None:
        seen.append(graph)
        own(graph)

    torch.cuda.CUDAGraph.replay = replay
    try:
        yield seen
    finally:
        torch.cuda.CUDAGraph.replay = own


def waits(step: Callable[[], object], count: int) -> float:
    """Waits of the host for the device, as torch notes them; 0 without a device."""
    if not torch.cuda.is_available():
        return 0.0
    torch.cuda.set_sync_debug_mode("warn")
    try:
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            for _ in range(count):
                step()
    finally:
        torch.cuda.set_sync_debug_mode("default")
    return sum("synchroniz" in str(one.message) for one in caught) / count
