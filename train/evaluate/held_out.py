"""Evaluations of a run on held-out prompts, within a share of its time."""

from __future__ import annotations

import math
import os
from collections.abc import Callable, Sequence
from typing import Any

import torch

from draftsmith.drafters.target.target import Target
from draftsmith.progress import Progress
from draftsmith.train.checkpoints import BestDraft, RunFolder
from draftsmith.train.config import TrainConfig
from draftsmith.train.data.dataset import TokenSequence
from draftsmith.train.evaluate.measured import TEMPERATURES, Figures, measure

SHARE = 0.1  # of --minutes, at most, for one evaluation


class HeldOut:
    """Called, it gives figures of the draft as it is at a step, which is kept if it is the best so
    far; None without held-out prompts. Later evaluations read the prompts that the first had time
    for.

    Every rank does the same, because a target that is spread over them runs on all of them only.
    """

    def __init__(
        self,
        config: TrainConfig,
        target: Target,
        sequences: Sequence[TokenSequence],
        now_s: Callable[[], float],
    ):
        """`now_s` is the same on every rank."""
        self.config, self.target, self.sequences, self.now_s = config, target, sequences, now_s
        minutes = math.inf if config.minutes is None else config.minutes
        self.within_s = SHARE * minutes * 60

    def expected_s(self, drafter: torch.nn.Module) -> float:
        """Most time that the evaluation after the last step may take: that of one prompt, for
        each of them. 0 where no time was set."""
        if not self.sequences or math.isinf(self.within_s):
            return 0.0
        begun_s = self.now_s()
        self._measured(drafter.eval(), self.sequences[:1])
        return min(self.within_s, (self.now_s() - begun_s) * len(self.sequences))

    def __call__(self, drafter: torch.nn.Module, step: int) -> Figures | None:
        if not self.sequences:
            return None
        count, shows = len(self.sequences), os.environ.get("RANK", "0") == "0"
        progress = Progress("evaluate", count * len(TEMPERATURES), unit="answers")
        clock: dict[str, Any] = {"within_s": self.within_s, "now_s": self.now_s}
        shown = {"progress": progress.update} if shows else {}
        figures = self._measured(drafter, self.sequences, **clock, **shown)
        self.sequences = self.sequences[: figures.prompts]
        if shows:
            fewer = figures.prompts < count
            progress.close(f"{figures.prompts} of {count} prompts, by --minutes" if fewer else "")
            evaluation = [measurement.to_dict() for measurement in figures.measurements]
            BestDraft(RunFolder(self.config.out).training).offer(
                drafter, step=step, tau=figures.tau.value, evaluation=evaluation
            )
        return figures

    def _measured(
        self, drafter: Any, sequences: Sequence[TokenSequence], **options: Any
    ) -> Figures:
        return measure(
            drafter,
            self.target,
            sequences,
            k=self.config.unroll.steps,
            max_new_tokens=self.config.eval_tokens,
            batch_size=self.config.batch_size,
            **options,
        )
