"""Time of the kernels of a captured pass inside its one call: `scripts/bench_step --rounds`. Passes
repeated alone, after a wait or other reading, and in rounds of an engine take turns in one process."""

from __future__ import annotations

import argparse
import copy
import ctypes
import itertools
import json
import resource
import statistics
import time
from collections import defaultdict
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple
from unittest.mock import patch

import torch

from draftsmith.drafters.checkpoint import load
from draftsmith.drafters.compiled.captured import capture_lm
from draftsmith.drafters.target.target import Target, TargetOutput
from draftsmith.kernels.call_list import Call, CallList, Kind, at, packed
from draftsmith.kernels.host_compiler import compiled
from draftsmith.serve.bench.prompts import read_prompts
from draftsmith.serve.config import EngineConfig
from draftsmith.serve.engine.build import build_engine
from draftsmith.serve.engine.engine import Engine
from draftsmith.serve.sampling.params import SamplingParams
from draftsmith.serve.stats import PHASES
from scripts.bench.engine.kernel_times import gated_kernel, label_of
from scripts.bench.engine.step import target_pass

CLOCK = Path(__file__).with_name("clock_cpu.cpp")
STEPS = 10  # passes of a turn that count, after one that does not
WAIT_S = 0.0005  # about as long as a round's draft
PROMPT_CHARS, MAX_TOKENS = 400, 96
Row = dict[str, float]


class Times(NamedTuple):
    """ms of one pass."""

    kernels: list[float]  # one after another
    around: Row


class StampedCalls:
    """In place of a list of calls, the same with the time before, between and behind them."""

    def __init__(self, whole: CallList, labels: list[str]):
        library = compiled(CLOCK)
        assert library is not None  # as there is a list
        self.labels, count = labels, len(whole.calls)
        self._ns = (ctypes.c_int64 * (count + 1))()
        begin = ctypes.addressof(self._ns)
        stamps = [
            packed(
                Call(Kind.ADD, library.stamp, [at(None), at(None), at(begin + 8 * index)], [0] * 3)
            )
            for index in range(count + 1)
        ]
        pairs = zip(stamps, whole.calls)
        self._stamped = copy.copy(whole)
        calls = [one for pair in pairs for one in pair] + stamps[-1:]
        self._stamped.calls = (type(calls[0]) * len(calls))(*calls)

    def __call__(self, *arguments: Any) -> bool:
        return self._stamped(*arguments)

    def times(self, begun_ns: int, ended_ns: int) -> Times:
        """Times of the last pass, which began and ended then."""
        ns = list(self._ns)
        kernels = [(ended - begun) / 1e6 for begun, ended in itertools.pairwise(ns)]
        around = {
            "before the kernels": (ns[0] - begun_ns) / 1e6,
            "behind, with the head": (ended_ns - ns[-1]) / 1e6,
            "pass": (ended_ns - begun_ns) / 1e6,
        }
        return Times(kernels, around)


class TimedTarget:
    """Takes the times of each pass of a captured target while it is entered."""

    def __init__(self, target: Target, longest: int):
        forwards: Any = target.forwards
        self.one_call = None if forwards is None else forwards.body.calls
        if self.one_call is None:
            raise SystemExit("--rounds: a pass of this target is not one call here; leave it out")
        self.one_call.reach(longest)  # later, the list would be made anew
        whole, gated = self.one_call.calls, gated_kernel(target.dtype)
        self.calls = StampedCalls(whole, [label_of(call, gated) for call in whole.calls])
        self.target = target
        self.last = Times([], {})
        self._forward = target.forward

    def forward(self, *arguments: Any) -> TargetOutput:
        faults, begun_cpu_s = _page_faults(), time.thread_time()
        begun_ns = time.monotonic_ns()
        output = self._forward(*arguments)
        self.last = self.calls.times(begun_ns, time.monotonic_ns())
        self.last.around["pass, CPU time"] = 1e3 * (time.thread_time() - begun_cpu_s)
        self.last.around["page faults"] = _page_faults() - faults
        return output

    def measure(self, runs: dict[str, Callable[[], Any]], turns: int) -> dict[str, Row]:
        """Lower quartiles, as other work only adds to them, of the last pass of each run by kind of
        kernel, of what is around its kernels, and of what the run itself gives."""
        found: dict[str, list[Times]] = {name: [] for name in runs}
        with (
            torch.inference_mode(),
            patch.object(self.one_call, "calls", self.calls),
            patch.object(self.target, "forward", self.forward),
        ):
            for turn in range(turns):
                for name, run in list(runs.items())[:: 1 if turn % 2 else -1]:
                    run()
                    for _ in range(STEPS):
                        added = run()
                        if isinstance(added, dict):
                            self.last.around.update(added)
                        found[name].append(self.last)
        return {name: self._row(times) for name, times in found.items()}

    def _row(self, times: list[Times]) -> Row:
        row: Row = defaultdict(float)
        # Of each kernel by itself: few passes have no other work between two of them.
        for label, ms in zip(self.calls.labels, zip(*(one.kernels for one in times))):
            row[label] += quartile(ms)
        row["all kernels"] = sum(row.values())
        return row | {key: quartile([one.around[key] for one in times]) for key in times[0].around}


def _page_faults() -> int:
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt


def engine_rounds(engine: Engine, prompt: list[int], temperature: float) -> Callable[[], Row]:
    """Decoding rounds of one stream, which is begun again when it ends: ms by phase."""
    params = SamplingParams(max_tokens=MAX_TOKENS, temperature=temperature, ignore_eos=True, seed=0)

    def run() -> Row:
        if not engine.scheduler.running:
            request = engine.submit(prompt, params)
            while request.num_output < 2:
                engine.step()
        before = dict(engine.stats.time_s)
        begun_s, begun_cpu_s = time.perf_counter(), time.thread_time()
        engine.step()
        cpu_s, wall_s = time.thread_time() - begun_cpu_s, time.perf_counter() - begun_s
        phases = {name: 1e3 * (engine.stats.time_s[name] - before[name]) for name in PHASES}
        return phases | {"round": 1e3 * wall_s, "round, CPU time": 1e3 * cpu_s}

    return run


def after(first: Callable[[], Any], run: Callable[[], Any]) -> Callable[[], None]:
    def both() -> None:
        first()
        run()

    return both


def busy() -> None:
    end_s = time.perf_counter() + WAIT_S
    while time.perf_counter() < end_s:
        pass


def round_kernels(target: Target, drafter: Any, k: int, turns: int) -> dict[str, Row]:
    """Times, as `measure` has them, of passes of 1 and `k` + 1 tokens of the captured target alone,
    of the latter after other work, and in rounds without and with the draft."""
    read = torch.zeros(k * drafter.read_bytes().token // 4)
    text = read_prompts("stdlib:code", count=1, chars=PROMPT_CHARS, seed=0)[0]["prompt"]
    prompt = target.tokenizer()(text)["input_ids"]
    timed = TimedTarget(target, len(prompt) + MAX_TOKENS + k + 1)
    many = target_pass(target, k + 1)
    runs: dict[str, Callable[[], Any]] = {
        "1 token": target_pass(target, 1),
        f"{k + 1} tokens": many,
        "after its bytes": after(read.sum, many),
        "after work": after(busy, many),
        "after sleep": after(lambda: time.sleep(WAIT_S), many),
    }
    for name, one in (("no draft", None), (f"k = {k}", drafter)):
        engine = build_engine(target, one, EngineConfig(k=k))
        for temperature in (0.0, 1.0):
            label = f"{name}, T = {temperature:g}"
            runs[label] = engine_rounds(engine, prompt, temperature)
    return timed.measure(runs, turns)


def quartile(values: Sequence[float]) -> float:
    return statistics.quantiles(values, n=4, method="inclusive")[0]


def show(columns: dict[str, Row]) -> None:
    print(f"{'lower quartile, ms':24}" + "".join(f"{name:>17}" for name in columns))
    for key in dict.fromkeys(key for column in columns.values() for key in column):
        cells = [f"{column[key]:.3f}" if key in column else "-" for column in columns.values()]
        print(f"{key:24}" + "".join(f"{cell:>17}" for cell in cells))


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--target", default="scripts/quickstart_target")
    parser.add_argument("--draft", type=Path, default="scripts/quickstart_draft")
    parser.add_argument("--dtype", default="float32", choices=("float32", "bfloat16"))
    parser.add_argument("--k", type=int, default=3)
    parser.add_argument("--turns", type=int, default=40, help="turns of ten passes each")
    parser.add_argument("--out", type=Path, help="writes the JSON here too")
    options = parser.parse_args()
    torch.set_num_threads(1)
    target = Target.load(options.target, dtype=options.dtype)
    capture_lm(target)
    columns = round_kernels(target, load(options.draft, target), options.k, options.turns)
    if options.out is not None:
        text = json.dumps({"rounds_ms": columns}, indent=1)
        options.out.write_text(text + "\n", encoding="utf-8")
    show(columns)


if __name__ == "__main__":
    main()
