"""How far a run is, in steps or in time, and the learning rate that goes with it."""

from __future__ import annotations

import math
import time

from draftsmith.train.config import OptimConfig


class Clock:
    """Progress of a run bounded by steps and, optionally, by wall-clock time. `elapsed_s` survives a resume."""

    def __init__(self, *, total_steps: int, budget_s: float | None):
        self.total_steps = total_steps
        self.budget_s = budget_s
        self.elapsed_s = 0.0
        self._ticked_s = time.monotonic()

    def start(self, elapsed_s: float = 0.0) -> None:
        self.elapsed_s = elapsed_s
        self._ticked_s = time.monotonic()

    def tick(self) -> float:
        """Adds the time since the last tick; returns `elapsed_s`."""
        now_s = time.monotonic()
        self.elapsed_s += now_s - self._ticked_s
        self._ticked_s = now_s
        return self.elapsed_s

    def share_done(self, step: int) -> float:
        """0 at the beginning, 1 when steps or time run out. Time counts in whole ticks, so a step sees one value."""
        by_steps = step / self.total_steps
        by_time = self.elapsed_s / self.budget_s if self.budget_s else 0.0
        return min(1.0, max(by_steps, by_time))

    def out_of_time(self) -> bool:
        return self.budget_s is not None and self.elapsed_s >= self.budget_s


def lr_factor(config: OptimConfig, share_done: float) -> float:
    """Learning rate as a share of the peak: linear warm-up, then cosine or linear to `final`, or constant."""
    if share_done < config.warmup:
        # A step taken at share 0 must still learn something.
        return max(share_done / config.warmup, 0.01)
    if config.schedule == "constant":
        return 1.0
    past = (share_done - config.warmup) / max(1.0 - config.warmup, 1e-9)
    shape = 0.5 * (1.0 + math.cos(math.pi * past)) if config.schedule == "cosine" else 1.0 - past
    return config.final + (1.0 - config.final) * shape
