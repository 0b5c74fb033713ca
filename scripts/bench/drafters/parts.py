"""Share of each part in a training's time, by timers around the functions that do it. A part inside
another counts for itself alone."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import wraps
from itertools import count
from typing import Any

import torch
from accelerate import Accelerator
from accelerate.optimizer import AcceleratedOptimizer

from draftsmith.train import session
from draftsmith.train.config import TrainConfig
from draftsmith.train.objective import unrolled_loss
from draftsmith.train.objective.teacher import LiveSource
from draftsmith.train.trainer import DraftTrainer

# Draft passes come between target and head, one part a depth.
TARGET, HEAD, BACKWARD, OPTIMIZER, DATA = "target", "head, loss", "backward", "optimizer", "data"


def device_done() -> None:
    """Waits for what a CUDA device was given to compute."""
    if torch.cuda.is_available():
        torch.cuda.synchronize()


class Parts:
    """Seconds by part, as `now` counts them when `done` has returned."""

    def __init__(self, now: Callable[[], float], done: Callable[[], None] = device_done):
        self.now, self.done = now, done
        self.seconds: defaultdict[str, float] = defaultdict(float)
        self._inside = [0.0]  # of the parts within each open one

    @contextmanager
    def timed(self, name: str) -> Iterator[None]:
        self.done()
        begun_s = self.now()
        self._inside.append(0.0)
        try:
            yield
        finally:
            self.done()
            spent_s = self.now() - begun_s
            self.seconds[name] += spent_s - self._inside.pop()
            self._inside[-1] += spent_s

    def around(self, name: str, call: Callable[..., Any]) -> Callable[..., Any]:
        @wraps(call)
        def inner(*arguments: Any, **options: Any) -> Any:
            with self.timed(name):
                return call(*arguments, **options)

        return inner

    def by_depth(self, unroll: Callable[..., Any]) -> Callable[..., Any]:
        @wraps(unroll)
        def inner(*arguments: Any, **options: Any) -> Iterator[Any]:
            steps = iter(unroll(*arguments, **options))
            for depth in count(1):
                with self.timed(f"depth {depth}"):
                    step = next(steps, None)
                if step is None:
                    del self.seconds[f"depth {depth}"]
                    return
                yield step

        return inner

    def install(self) -> None:
        """Time every training of this process."""
        for owner, name, part in (
            (LiveSource, "read", TARGET),
            (unrolled_loss, "_divergence", HEAD),
            (Accelerator, "backward", BACKWARD),
            (Accelerator, "clip_grad_norm_", OPTIMIZER),
            (AcceleratedOptimizer, "step", OPTIMIZER),
            (DraftTrainer, "get_batch_samples", DATA),
        ):
            setattr(owner, name, self.around(part, getattr(owner, name)))
        new_drafter = session.new_trainee_drafter

        def timed_drafter(config: TrainConfig, material: session.Material) -> torch.nn.Module:
            drafter: Any = new_drafter(config, material)
            drafter.unroll = self.by_depth(drafter.unroll)
            return drafter

        session.new_trainee_drafter = timed_drafter
