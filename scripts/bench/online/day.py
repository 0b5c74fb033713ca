"""Twelve hours of traffic through the real engine and the real daemon in one process, as fast as
they go. Started by scripts/bench_day."""

from __future__ import annotations

import argparse
import math
import os
import random
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from itertools import accumulate
from pathlib import Path
from statistics import mean, stdev
from typing import cast

import numpy as np
import torch

from draftsmith.distill.buffer.traffic import OpenRequests, ServedText
from draftsmith.distill.gate.scoring import score
from draftsmith.drafters.interface import TrainedDrafter
from draftsmith.files import write_json, write_text
from draftsmith.progress import Progress
from draftsmith.record import RoundRecord
from scripts.bench.drafters.figures import Figure, figure
from scripts.bench.online.cells import FIRST, LEARNED, SECOND, THIRD
from scripts.bench.online.domains import Ask, asks
from scripts.bench.online.setting import MAX_LENGTH, Setting, learning, open_setting
from scripts.bench.online.world import K, Pipe, World
from scripts.paths import ROOT

WINDOWS, WINDOW_S = 72, 600.0
PAGE_MIB = os.sysconf("SC_PAGE_SIZE") / 2**20
SETTLED = 700  # requests after which every bounded store of the learner is full
# From which window on which domains are asked for, and how much each. Between two entries named
# `gradual` shares move evenly.
DAY: tuple[tuple[int, dict[str, float]], ...] = (
    (0, {FIRST: 1.0}),
    (18, {SECOND: 1.0}),
    (36, {SECOND: 0.5, THIRD: 0.5}),
    (48, {FIRST: 1.0}),
    (60, {FIRST: 1 / 3, SECOND: 1 / 3, THIRD: 1 / 3}),
)


@dataclass(frozen=True)
class Window:
    """Ten minutes of traffic; alpha of both drafts is exact, at the same positions of the same
    texts."""

    requests: int
    is_shift: bool
    version: int
    rolled_back: int  # versions, until its end
    alpha_live: float
    alpha_static: float
    gain: float  # mean over its requests of the difference
    gain_half: float  # half of its 95 % interval
    resident_mib: float
    cpu_s: float

    @property
    def is_behind(self) -> bool:
        return self.gain < 0


class ClockedPipe(Pipe):
    """Records carry the simulated time, by which the drift detector counts its false alarms; a copy
    of them is stitched."""

    def __init__(self, folder: Path):
        super().__init__(folder)
        self.now_s = time.time()
        self.open = OpenRequests()

    def put(self, record: RoundRecord) -> None:
        record.time_s = self.now_s
        super().put(record)
        self.open.add([record])


def main(arguments: Sequence[str]) -> None:
    chosen = options(arguments)
    torch.set_num_threads(1)
    setting = open_setting(chosen.work, target_minutes=chosen.target_minutes)
    windows = live_through(setting, chosen)
    report = {
        "schema": 1, "windows": [asdict(window) for window in windows],
        "requests": sum(window.requests for window in windows),
        "seed": chosen.seed, "load": os.getloadavg()[0],
    }  # fmt: skip
    text = table(windows)
    print(text)
    if chosen.out is not None:
        write_text(chosen.out.with_suffix(".md"), text + "\n")
        write_json(chosen.out.with_suffix(".json"), report)
        draw(chosen.out.with_suffix(".png"), windows)


def options(arguments: Sequence[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="scripts/bench_day", description="Twelve hours of traffic, compressed."
    )
    parser.add_argument(
        "--work",
        type=Path,
        default=ROOT / "runs" / "online",
        help="target and drafts, shared with bench_online",
    )
    parser.add_argument(
        "--out",
        type=Path,
        help="write table (.md), figures (.json) and picture (.png) beside each other here",
    )
    parser.add_argument(
        "--busiest",
        type=int,
        default=100,
        help="requests of the busiest ten minutes; the quietest have a quarter",
    )
    parser.add_argument("--windows", type=int, default=WINDOWS, help="of ten simulated minutes")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument(
        "--target-minutes", type=float, default=9.0, help="training time of the target, once"
    )
    return parser.parse_args(arguments)


def live_through(setting: Setting, chosen: argparse.Namespace) -> list[Window]:
    seed = chosen.seed
    static = setting.load(setting.draft(seed))
    how = learning(LEARNED, 4 * chosen.busiest)
    progress = Progress("bench_day", total=chosen.windows, unit="windows", stream=sys.stderr)
    windows: list[Window] = []
    with setting.room(f"day-{seed}") as folder:
        world = World(
            setting.target,
            setting.draft(seed),
            folder,
            how.learn,
            gate=how.gate,
            seed=seed,
            pipe=ClockedPipe,
        )
        pipe = world.pipe
        assert isinstance(pipe, ClockedPipe)
        begin, begun_s = 0, pipe.now_s
        for number in range(chosen.windows):
            pipe.now_s = begun_s + number * WINDOW_S
            some = list(requests_of(setting, number, chosen, begin))
            begin += len(some)
            windows.append(
                serve_window(
                    setting,
                    world,
                    pipe,
                    static,
                    some,
                    is_shift=any(at == number for at, _ in DAY[1:]),
                )
            )
            progress.update(
                number + 1,
                f"alpha {windows[-1].alpha_live:.3f}, static {windows[-1].alpha_static:.3f}",
            )
    progress.close()
    return windows


def requests_of(
    setting: Setting, number: int, chosen: argparse.Namespace, begin: int
) -> Iterator[Ask]:
    """A morning, a noon and an evening: between a quarter of the busiest window and all of it."""
    load = 0.625 - 0.375 * math.cos(2 * math.pi * number / WINDOWS)
    shares = next(shares for at, shares in reversed(DAY) if number >= at)
    generator = random.Random(f"{chosen.seed} {number}")
    stream = generator.choices(
        list(shares), weights=list(shares.values()), k=max(1, round(load * chosen.busiest))
    )
    return asks(setting.prompts(chosen.seed), stream, begin=begin)


def serve_window(
    setting: Setting,
    world: World,
    pipe: ClockedPipe,
    static: TrainedDrafter,
    some: Sequence[Ask],
    *,
    is_shift: bool,
) -> Window:
    """Texts are scored by the weights that were live when they ended, and by the static draft."""
    begun_s = time.process_time()
    live, fixed = [], []
    for _ in world.serve(some):
        texts = [text for text in pipe.open.take(idle_s=math.inf) if text.is_scorable]
        served = cast(TrainedDrafter, world.server.engine.drafter)
        live += alphas(setting, served, texts)
        fixed += alphas(setting, static, texts)
    paired = [float((a - b).mean()) for a, b in zip(live, fixed, strict=True) if len(a)]
    half = 1.96 * stdev(paired) / math.sqrt(len(paired)) if len(paired) > 1 else math.nan
    return Window(
        len(some), is_shift, world.live, world.daemon.counters.rolled_back,
        float(np.concatenate(live).mean()), float(np.concatenate(fixed).mean()), mean(paired), half,
        resident_mib(), time.process_time() - begun_s,
    )  # fmt: skip


def alphas(
    setting: Setting, drafter: TrainedDrafter, texts: Sequence[ServedText]
) -> list[np.ndarray]:
    return [
        one.alpha
        for one in score(drafter, setting.target, texts, max_depth=K, max_length=MAX_LENGTH)
    ]


def resident_mib() -> float:
    return int(Path("/proc/self/statm").read_text(encoding="ascii").split()[1]) * PAGE_MIB


def slope_a_window(values: Sequence[float]) -> Figure:
    """Least squares; the interval is that of four stretches' own slopes, since neighbours resemble
    each other."""
    size = len(values) // 4
    if size < 3:
        return Figure(math.nan, math.nan)
    stretches = [values[begin : begin + size] for begin in range(0, 4 * size, size)]
    whole = float(np.polyfit(range(len(values)), values, 1)[0])
    return Figure(
        whole, figure([float(np.polyfit(range(size), some, 1)[0]) for some in stretches]).half
    )


def table(windows: Sequence[Window]) -> str:
    counted = [window for window in windows if not window.is_shift]
    behind = [window for window in counted if window.is_behind]
    sure = [window for window in behind if window.gain + window.gain_half < 0]
    served = accumulate(window.requests for window in windows)
    settled = [
        window.resident_mib
        for window, count in zip(windows, served, strict=True)
        if count > SETTLED
    ]
    rows = [
        (
            "windows of ten minutes, requests",
            f"{len(windows)}, {sum(window.requests for window in windows)}",
        ),
        (
            "alpha, mean over windows: live, static",
            f"{mean(w.alpha_live for w in windows):.3f}, "
            f"{mean(w.alpha_static for w in windows):.3f}",
        ),
        (
            "windows below the static draft, shifts' own left out",
            f"{len(behind)} of {len(counted)}",
        ),
        ("of these, with a 95 % interval below 0", str(len(sure))),
        ("worst window", f"{min(window.gain for window in counted):+.4f}"),
        (
            "versions published, rolled back",
            f"{max(window.version for window in windows) - 1}, {windows[-1].rolled_back}",
        ),
        (
            "resident MiB: first, last window",
            f"{windows[0].resident_mib:.0f}, {windows[-1].resident_mib:.0f}",
        ),
        (f"MiB a window, after {SETTLED} requests", slope_a_window(settled).text(3)),
        ("CPU seconds", f"{sum(window.cpu_s for window in windows):.0f}"),
    ]
    return "\n".join(
        [
            "| twelve hours, compressed | |",
            "| --- | --- |",
            *(f"| {name} | {value} |" for name, value in rows),
        ]
    )


def draw(path: Path, windows: Sequence[Window]) -> None:
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure_, (above, below) = pyplot.subplots(
        2, 1, figsize=(8, 4.5), sharex=True, height_ratios=(3, 1)
    )
    hours = [(index + 1) / 6 for index in range(len(windows))]
    above.plot(hours, [window.alpha_live for window in windows], label="learning")
    above.plot(
        hours,
        [window.alpha_static for window in windows],
        color="black",
        label="static, on the same texts",
    )
    for at, _ in DAY[1:]:
        above.axvline(at / 6, color="gray", linewidth=0.8, linestyle=":")
    above.set_ylabel("alpha")
    above.legend()
    below.plot(hours, [window.resident_mib for window in windows], color="tab:green")
    below.set_ylabel("resident MiB")
    below.set_ylim(bottom=0)
    below.set_xlabel("hours")
    figure_.tight_layout()
    figure_.savefig(path, dpi=110)
    pyplot.close(figure_)


if __name__ == "__main__":
    main(sys.argv[1:])
