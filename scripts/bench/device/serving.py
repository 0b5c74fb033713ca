"""Rounds of an engine with random weights: no draft, EAGLE-3, and both without captured forwards and
graphs. Milliseconds, launches and waits a round, and the share of a round in which the target's
weights could be read; what a draft brings is not measured."""

from __future__ import annotations

import statistics
import sys
import time
import warnings
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch.profiler import ProfilerActivity, profile

from draftsmith.drafters.target.target import Target
from draftsmith.files import write_json
from draftsmith.serve.config import EngineConfig
from draftsmith.serve.engine.build import build_engine
from draftsmith.serve.engine.engine import Engine
from draftsmith.serve.requests.request import RequestOptions
from draftsmith.serve.sampling.params import SamplingParams
from draftsmith.serve.warm_up import warm_up
from scripts.bench.device.shapes import device_of, random_draft, random_target, stage_parser
from scripts.bench.kernels.timing import Stopwatch, copy_bandwidth

LAUNCHES = ("cudaLaunchKernel", "cuLaunchKernel", "cudaGraphLaunch", "cudaMemcpyAsync", "cudaMemsetAsync")  # fmt: skip


class Work(NamedTuple):
    streams: tuple[int, ...]
    prompt: int
    settle: int  # rounds behind the prompts, before anything is measured
    timed: int
    counted: int  # rounds whose launches and waits are counted


UNREAD = RequestOptions(text=False)  # there is no tokenizer
FULL = Work((1, 8, 32), 512, 8, 60, 8)
TINY = Work((1, 2), 6, 2, 3, 2)
WAYS: dict[str, dict[str, Any]] = {
    "no draft": {"draft": False, "compile": "auto"},
    "eagle3": {"draft": True, "compile": "auto"},
    "no draft, nothing captured": {"draft": False, "compile": "off"},
    "eagle3, nothing captured": {"draft": True, "compile": "off"},
}


def main(arguments: list[str] | None = None) -> int:
    options = stage_parser("serving", __doc__).parse_args(arguments)
    device, work = device_of(options), TINY if options.dry_run else FULL
    bandwidth = copy_bandwidth(Stopwatch(device, 0.05))
    report: dict[str, Any] = {
        "schema": 1, "size": options.size, "copy_bytes_s": bandwidth, "ways": {},
    }  # fmt: skip
    for name, way in WAYS.items():
        # A target of its own: what was captured stays captured.
        target = random_target(options.size, device)
        report["reading_ms"] = 1e3 * weight_bytes(target) / bandwidth
        report["ways"][name] = measure(target, work, report["reading_ms"], **way)
        write_json(options.out, report)
        print(name, report["ways"][name], flush=True)
        del target
        if device.type == "cuda":
            torch.cuda.empty_cache()
    return 0


def weight_bytes(target: Target) -> int:
    """Bytes that a pass reads at least: of the input embedding next to nothing."""
    model = target.model
    embedding = model.get_input_embeddings().weight
    every = sum(one.numel() * one.element_size() for one in model.parameters())
    return every - embedding.numel() * embedding.element_size()


def measure(
    target: Target, work: Work, reading_ms: float, *, draft: bool, compile: str
) -> dict[str, Any]:
    prefill = 2 * max(work.streams)  # rounds at most: each reads a whole prompt or two halves
    config = EngineConfig(
        k=3,
        max_batch=max(work.streams),
        max_length=work.prompt + 4 * (prefill + work.settle + work.timed + 2 * work.counted) + 8,
        compile=compile,
        prefix_cache=False,
    )
    engine = build_engine(target, random_draft(target) if draft else None, config)
    begun_s = time.perf_counter()
    warm_up(engine)
    found: dict[str, Any] = {"warm_up_s": round(time.perf_counter() - begun_s, 2)}
    for temperature in (0.0, 1.0):
        for streams in work.streams:
            name = f"T={temperature:g}, {streams} streams"
            found[name] = rounds(engine, work, streams, temperature)
            found[name]["of_reading"] = reading_ms / found[name]["ms_a_round"]
    if target.device.type == "cuda":
        found["peak_bytes"] = torch.cuda.max_memory_allocated(target.device)
        torch.cuda.reset_peak_memory_stats(target.device)
    return found


def rounds(engine: Engine, work: Work, streams: int, temperature: float) -> dict[str, Any]:
    room = engine.max_length - work.prompt
    params = SamplingParams(temperature=temperature, max_tokens=room, ignore_eos=True)
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
    before, times_ms = sum(request.num_tokens for request in requests), []
    for _ in range(work.timed):
        begun_s = time.perf_counter()
        engine.step()  # which ends with the wait for its result
        times_ms.append(1e3 * (time.perf_counter() - begun_s))
    committed = sum(request.num_tokens for request in requests) - before
    found = {
        "ms_a_round": statistics.median(times_ms),
        "fastest_ms": min(times_ms),
        "tokens_s": 1e3 * committed / sum(times_ms),
        "launches_a_round": launches(engine.step, work.counted),
        "waits_a_round": waits(engine.step, work.counted),
    }
    for request in requests:
        engine.cancel(request)
    return found


def launches(step: Callable[[], object], count: int) -> float:
    """Calls of the driver that put work on the device; 0 without one."""
    activities = [ProfilerActivity.CPU]
    if torch.cuda.is_available():
        activities.append(ProfilerActivity.CUDA)
    with profile(activities=activities) as seen:
        for _ in range(count):
            step()
    return sum(event.count for event in seen.key_averages() if event.key in LAUNCHES) / count


def waits(step: Callable[[], object], count: int) -> float:
    """Waits of the host for the device, as torch notes them; 0 without a device."""
    if not torch.cuda.is_available():
        for _ in range(count):
            step()
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


if __name__ == "__main__":
    sys.exit(main())
