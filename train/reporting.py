"""Reports of a run while it goes: metrics summed over a window, metrics.jsonl, one progress line,
and a stop when the time is up or the loss is not finite."""

from __future__ import annotations

import json
import math
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from transformers import TrainerCallback, TrainerControl, TrainerState, TrainingArguments

from draftsmith.errors import UserError
from draftsmith.files import named
from draftsmith.kernels.divergence.kind import DivergenceKind
from draftsmith.progress import Progress
from draftsmith.train.checkpoints import RunFolder
from draftsmith.train.objective.rounds_of_text import deepen, predicted_tau
from draftsmith.train.objective.unrolled_loss import UnrolledLoss
from draftsmith.train.optim import Clock

# Of the Trainer's summary, and of no use on a line of metrics.
DROPPED = {
    "total_flos",
    "train_loss",
    "train_runtime",
    "train_samples_per_second",
    "train_steps_per_second",
    "epoch",
}


class Reporter(TrainerCallback):
    """Writes on rank 0 only; counts time and stops on every rank alike. `window` is read after each
    step; None where a device would be waited for."""

    def __init__(
        self,
        folder: RunFolder,
        clock: Clock,
        *,
        steps_per_epoch: float,
        label: str,
        eval_every: int = 0,
        window: MetricWindow | None = None,
    ):
        self.folder = folder
        self.clock = clock
        self.steps_per_epoch = steps_per_epoch
        self.label = label
        self.eval_every = eval_every
        self.evaluated = -1  # step of the last evaluation
        self.progress: Progress | None = None
        self.window = window
        self.logged = 0  # step of the last line with a loss
        self.shown: dict[str, float] = {}  # beside the bar

    def on_train_begin(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **unused: Any
    ) -> None:
        self.clock.start(self.clock.elapsed_s)
        self.logged = state.global_step
        if not state.is_world_process_zero:
            return
        if self.clock.budget_s is None:
            self.progress = Progress(
                self.label, state.max_steps, unit="steps", start=state.global_step
            )
        else:
            self.progress = Progress(
                self.label, round(self.clock.budget_s), unit="s", start=round(self.clock.elapsed_s)
            )

    def on_step_end(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **unused: Any
    ) -> None:
        if self._is_over(args):
            control.should_training_stop = control.should_save = True
        if control.should_training_stop:
            control.should_log = True
        elif self.eval_every:
            control.should_evaluate = state.global_step % self.eval_every == 0
        if self.progress is not None:
            done = (
                state.global_step
                if self.clock.budget_s is None
                else min(self.progress.total, int(self.clock.elapsed_s))
            )
            if self.window is not None:
                self.shown |= self.window.so_far(state.global_step - self.logged)
            self.progress.update(done, note_of(self.shown))

    def on_epoch_end(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **unused: Any
    ) -> None:
        # After the last checkpoint is saved, and before trackers end.
        is_new = state.global_step != self.evaluated
        control.should_evaluate = control.should_training_stop and is_new

    def on_evaluate(
        self,
        args: TrainingArguments,
        state: TrainerState,
        control: TrainerControl,
        model: torch.nn.Module | None = None,
        **unused: Any,
    ) -> None:
        self.evaluated = state.global_step
        # Without another step, whose draft would be evaluated once more.
        if not control.should_training_stop and self._is_over(args):
            self._stop_when_lost({}, state, model)
            control.should_training_stop = control.should_save = True

    def _is_over(self, args: TrainingArguments) -> bool:
        """Counts the time until now; True where that was all."""
        self.clock.tick()
        if self.clock.budget_s is not None:
            self.clock.elapsed_s = agreed(self.clock.elapsed_s, args)
        return self.clock.out_of_time()

    def on_log(
        self,
        args: TrainingArguments,
        state: TrainerState,
        control: TrainerControl,
        logs: dict[str, float] | None = None,
        model: torch.nn.Module | None = None,
        **unused: Any,
    ) -> None:
        logs = {name: value for name, value in (logs or {}).items() if name not in DROPPED}
        if not logs:
            return
        self._stop_when_lost(logs, state, model if control.should_save else None)
        if state.is_world_process_zero:
            epoch = round(state.global_step / self.steps_per_epoch, 4)
            append_line(
                self.folder.metrics,
                {
                    "step": state.global_step,
                    "epoch": epoch,
                    "elapsed_s": round(self.clock.elapsed_s, 2),
                    **logs,
                },
            )
        if "loss" in logs:
            self.shown |= logs
            self.logged = state.global_step

    def on_save(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **unused: Any
    ) -> None:
        if args.world_size > 1:
            # Every rank has written its part.
            torch.distributed.barrier()
        # Without another step, which would be saved once more.
        if self._is_over(args):
            control.should_training_stop = True
        if state.is_world_process_zero:
            self.folder.complete(
                step=state.global_step,
                elapsed_s=self.clock.elapsed_s,
                processes=args.world_size,
                passes=args.world_size * args.gradient_accumulation_steps,
                kept_s=self.clock.kept_s,
            )

    def on_train_end(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **unused: Any
    ) -> None:
        if self.progress is not None:
            self.progress.close(
                f"{state.global_step} steps, {note_of(self.shown) or 'all of them done before'}"
            )

    def _stop_when_lost(
        self, logs: dict[str, float], state: TrainerState, model: torch.nn.Module | None
    ) -> None:
        """Runs before the checkpoint of the same step is written, so that no lost weights are ever
        saved."""
        lost = not math.isfinite(logs.get("loss", 0.0))
        if not lost and model is not None:
            lost = not all(bool(parameter.isfinite().all()) for parameter in model.parameters())
        if lost:
            newest = self.folder.newest()
            kept = (
                f"the last good checkpoint is {newest.path}"
                if newest
                else "no checkpoint had been written"
            )
            raise UserError(
                f"training diverged by step {state.global_step} (loss is not a number), {kept}; "
                "lower optim.lr"
            )


def note_of(logs: dict[str, float]) -> str:
    """`loss 2.31, alpha 0.71 0.60, tau 2.4`, or nothing for a line without a loss."""
    if "loss" not in logs:
        return ""
    alphas = [f"{value:.2f}" for name, value in logs.items() if name.startswith("alpha_")]
    parts = [f"loss {logs['loss']:.3f}", "alpha " + " ".join(alphas)]
    return ", ".join([*parts, f"tau {logs['tau']:.2f}"] if "tau" in logs else parts)


def agreed(elapsed_s: float, args: TrainingArguments) -> float:
    """Rank 0's time on every rank: learning rate and stop must be the same everywhere."""
    if args.world_size == 1:
        return elapsed_s
    shared = torch.tensor([elapsed_s], dtype=torch.float64, device=args.device)
    torch.distributed.broadcast(shared, src=0)
    return float(shared)


def rank_0_s(args: TrainingArguments) -> float:
    """Seconds of rank 0's clock, on every rank."""
    return agreed(time.monotonic(), args)


def append_line(path: Path, record: dict[str, Any]) -> None:
    """A JSON object per line, whole lines only, on disk as soon as written."""
    with named(path), open(path, "a", encoding="utf-8") as handle:
        handle.write(json.dumps(record) + "\n")


class MetricWindow:
    """Adds up every batch since the last log line."""

    # Batches that the predicted tau is computed on; that runs on the host, so a few recent
    # ones must do.
    RECENT = 4

    def __init__(self, depths: int, kind: DivergenceKind) -> None:
        self.depths = depths  # draft positions of a round that the predicted tau assumes
        self.name = kind.metric
        self.loss: torch.Tensor | float = 0.0  # summed over steps
        self.sums: torch.Tensor | None = None  # [4, S] weight, divergence, alpha, outside
        self.recent: list[tuple[torch.Tensor, torch.Tensor]] = []

    def add(self, unrolled: UnrolledLoss, loss_mask: torch.Tensor, loss: torch.Tensor) -> None:
        self.loss = self.loss + loss.detach()
        sums = torch.stack([value.detach().double() for value in unrolled.sums])
        self.sums = sums if self.sums is None else self.sums + sums
        if unrolled.keep is not None:
            self.recent = [*self.recent, (unrolled.keep.detach(), loss_mask)][-self.RECENT :]

    def so_far(self, steps: int) -> dict[str, float]:
        """loss and alpha_s of this rank over the window, which is of so many steps and stays."""
        if self.sums is None:
            return {}
        alpha = (self.sums[2] / self.sums[0].clamp(min=1e-9)).tolist()
        found = {f"alpha_{depth}": value for depth, value in enumerate(alpha, start=1)}
        return {"loss": float(self.loss) / steps, **found}

    def drain(self, reduce: Callable[..., torch.Tensor]) -> dict[str, float]:
        """forward_kl_s (or what is trained by), alpha_s (s from 1) and outside of the window over
        all ranks, tau of this rank's last batches; the window is empty afterwards."""
        if self.sums is None:
            return {}
        sums = reduce(self.sums, reduction="sum")
        weight, divergence, alpha, outside = (sums / sums[0].clamp(min=1e-9)).tolist()
        metrics = {}
        for depth in range(len(weight)):
            metrics[f"{self.name}_{depth + 1}"] = divergence[depth]
            metrics[f"alpha_{depth + 1}"] = alpha[depth]
        metrics["outside"] = outside[0]
        tau = self._tau()
        if tau is not None:
            metrics["tau"] = tau
        self.loss, self.sums, self.recent = 0.0, None, []
        return metrics

    def _tau(self) -> float | None:
        """Mean predicted tau of this rank's recent batches."""
        taus = [
            predicted_tau(deepen(keep, self.depths), loss_mask) for keep, loss_mask in self.recent
        ]
        known = [tau for tau in taus if tau is not None]
        return sum(known) / len(known) if known else None
