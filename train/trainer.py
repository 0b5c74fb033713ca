"""transformers' Trainer around the unrolled objective. Ours are the batches, the means of the loss
and the metrics; the rest is the Trainer's.

The frozen target is no submodule of what is trained, so neither optimizer nor DeepSpeed ever sees
it.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from safetensors import SafetensorError
from torch.optim.lr_scheduler import LambdaLR
from torch.utils.data import DataLoader
from transformers import PrinterCallback, Trainer, TrainingArguments

from draftsmith.drafters.interface import TextBatch, TrainedDrafter
from draftsmith.errors import UserError, first_line
from draftsmith.kernels.divergence.kind import FORWARD_KL, DivergenceKind
from draftsmith.train.checkpoints import whole
from draftsmith.train.config import OptimConfig, UnrollConfig
from draftsmith.train.data.batches import BatchPlan, pack
from draftsmith.train.data.dataset import TokenSequence
from draftsmith.train.data.mixture import Mixed
from draftsmith.train.evaluate.measured import Figures, HeldOut
from draftsmith.train.objective.teacher import TargetSource
from draftsmith.train.objective.unrolled_loss import UnrolledLoss, unrolled_loss
from draftsmith.train.optim import BETAS, Clock, lr_factor, muon_with_adamw
from draftsmith.train.reporting import MetricWindow

Inputs = dict[str, TextBatch]  # of one pass, as the Trainer hands it on: the key is "text"


class Trainee(torch.nn.Module):
    """The trained parameters, with a forward that returns the summed loss of a batch."""

    # The Trainer hands over the number of trained tokens of the whole optimizer step: the loss is a
    # mean over accumulated passes and ranks alike.
    accepts_loss_kwargs = True
    # The Trainer asks for it when a checkpoint holds tied weights once.
    _keys_to_ignore_on_save = None

    def __init__(
        self,
        drafter: torch.nn.Module,
        source: TargetSource,
        unroll: UnrollConfig,
        *,
        kind: DivergenceKind = FORWARD_KL,
    ):
        super().__init__()
        self.drafter = drafter
        self.unroll = unroll
        self.kind = kind
        self.source = source

    def forward(
        self, text: TextBatch, num_items_in_batch: torch.Tensor
    ) -> dict[str, torch.Tensor | UnrolledLoss]:
        drafter: TrainedDrafter = self.drafter
        unrolled = unrolled_loss(
            drafter,
            self.source,
            text,
            num_steps=self.unroll.steps,
            decay=self.unroll.decay,
            kind=self.kind,
        )
        return {"loss": unrolled.mean(num_items_in_batch), "unrolled": unrolled}


class DraftTrainer(Trainer):
    """`held_out` gives the figures of a draft at a step; `spare` is a second draft, needed
    under ZeRO-3 only."""

    def __init__(
        self,
        trainee: Trainee,
        arguments: TrainingArguments,
        *,
        sequences: Mixed,
        optim: OptimConfig,
        clock: Clock,
        plan: BatchPlan,
        held_out: HeldOut,
        spare: torch.nn.Module | None = None,
    ):
        self.sequences, self.plan = sequences, plan
        self.optim_config = optim
        self.clock = clock
        self.held_out = held_out
        self._measured: tuple[int, Figures | None] | None = None
        self.spare = spare
        self.window = MetricWindow(trainee.unroll.steps, trainee.kind)
        super().__init__(
            model=trainee, args=arguments, data_collator=as_inputs, train_dataset=sequences
        )
        self.remove_callback(PrinterCallback)

    def get_train_dataloader(self) -> DataLoader:
        """One plan for the whole run, already this rank's share: accelerate must not shard or
        shuffle it again."""
        self.plan.num_batches = self.args.max_steps * self.args.gradient_accumulation_steps
        return DataLoader(
            self.sequences,
            batch_sampler=self.plan,
            collate_fn=as_inputs,
            pin_memory=self.args.dataloader_pin_memory,
        )

    def get_batch_samples(
        self, epoch_iterator: Iterator, num_batches: int, device: torch.device
    ) -> tuple[list[Inputs], torch.Tensor]:
        """Passes of an optimizer step, and the divisor of its loss: its trained tokens."""
        passes, _ = super().get_batch_samples(epoch_iterator, num_batches, device)
        num_items = torch.stack([inputs["text"].weights.sum() for inputs in passes]).sum()
        return passes, self.accelerator.gather(num_items.to(device)).sum()

    def _prepare_inputs(self, inputs: Inputs) -> Inputs:
        return {"text": inputs["text"].to(self.args.device)}

    def create_optimizer(self, model: torch.nn.Module | None = None) -> torch.optim.Optimizer:
        optim = self.optim_config
        if self.optimizer is None and optim.optimizer == "muon":  # type: ignore[has-type]
            self.optimizer = muon_with_adamw(
                self.model.drafter,
                num_tokens=len(self.model.drafter.head_weight()),
                lr=optim.lr,
                betas=BETAS,
                weight_decay=optim.weight_decay,
                rank=self.args.process_index,
                processes=self.args.world_size,
            )
        return super().create_optimizer(model)

    def create_scheduler(
        self, num_training_steps: int, optimizer: torch.optim.Optimizer | None = None
    ) -> LambdaLR:
        if self.lr_scheduler is None:  # type: ignore[has-type]
            self.lr_scheduler = LambdaLR(
                self.optimizer if optimizer is None else optimizer,
                lambda step: lr_factor(self.optim_config, self.clock.share_done(step)),
            )
            self._created_lr_scheduler = True
        return self.lr_scheduler

    def compute_loss(
        self,
        model: torch.nn.Module,
        inputs: Inputs,
        return_outputs: bool = False,
        num_items_in_batch: torch.Tensor | None = None,
    ) -> torch.Tensor | tuple[torch.Tensor, dict[str, torch.Tensor | UnrolledLoss]]:
        outputs = model(**inputs, num_items_in_batch=num_items_in_batch)
        # Data-parallel ranks average their gradients, and `num_items_in_batch` already counts the
        # tokens of all.
        loss = outputs["loss"] * self.accelerator.num_processes
        self.window.add(outputs["unrolled"], inputs["text"].weights > 0, loss)
        return (loss, outputs) if return_outputs else loss

    def log(self, logs: dict[str, float], start_time: float | None = None) -> None:
        if "loss" in logs:
            logs |= self.window.drain(self.accelerator.reduce)
        super().log(logs, start_time)

    def evaluate(self, *unused: object, **also_unused: object) -> dict[str, float]:
        """Called by the Trainer at evaluation steps and at the end."""
        # Before ZeRO-3 gathers whole weights for nothing.
        if not self.held_out.sequences:
            return {}
        figures = self.held_out_figures(self.whole_drafter())
        self.model.train()
        if figures is None:
            return {}
        metrics = self.log_figures(figures)
        # Marks this step as evaluated, too.
        state, control = self.state, self.control  # type: ignore[has-type]
        self.control = self.callback_handler.on_evaluate(self.args, state, control, metrics)
        return metrics

    def log_figures(self, figures: Figures) -> dict[str, float]:
        metrics = {f"eval_{name}": value for name, value in figures.for_metrics().items()}
        self.log(metrics)
        return metrics

    def held_out_figures(self, drafter: torch.nn.Module) -> Figures | None:
        """Figures of the draft as it is, which a step takes once."""
        step = self.state.global_step
        if self._measured is None or self._measured[0] != step:
            self._measured = step, self.held_out(drafter, step)
        return self._measured[1]

    def _save_checkpoint(self, model: torch.nn.Module, trial: object) -> None:
        try:
            super()._save_checkpoint(model, trial)
        except (OSError, RuntimeError, SafetensorError) as error:
            # A full disk comes as any of these.
            raise UserError(
                f"the checkpoint of step {self.state.global_step} cannot be written "
                f"({first_line(error)}); make room in "
                f"{self.args.output_dir!r} and start again: the run goes on from the one before"
            ) from error

    def _load_from_checkpoint(
        self, resume_from_checkpoint: str, model: torch.nn.Module | None = None
    ) -> None:
        with whole(resume_from_checkpoint):
            super()._load_from_checkpoint(resume_from_checkpoint, model)

    def _load_optimizer_and_scheduler(self, checkpoint: str | None) -> None:
        with whole(checkpoint):
            super()._load_optimizer_and_scheduler(checkpoint)

    def _load_rng_state(self, checkpoint: str | None) -> None:
        with whole(checkpoint):
            super()._load_rng_state(checkpoint)

    def _save(
        self, output_dir: str | None = None, state_dict: dict[str, torch.Tensor] | None = None
    ) -> None:
        """Tied weights once: safetensors refuses tensors that share memory."""
        super()._save(
            output_dir, once_each(self.model.state_dict() if state_dict is None else state_dict)
        )

    def whole_drafter(self) -> torch.nn.Module:
        """The draft with all its weights, ready to evaluate or save. Every rank must call it."""
        if self.spare is None:
            return self.model.drafter.eval()
        gather_into(self.spare, self.model.drafter)
        return self.spare.eval()

    def last_metrics(self) -> dict[str, float]:
        return next((entry for entry in reversed(self.state.log_history) if "loss" in entry), {})


def as_inputs(rows: list[list[TokenSequence]]) -> Inputs:
    return {"text": pack(rows)}


def once_each(state: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    by_storage = {
        (tensor.data_ptr(), tensor.shape, tensor.stride()): name
        for name, tensor in reversed(state.items())
    }
    # Empty tensors (of other ranks' parts) all have the same address.
    return {
        name: tensor
        for name, tensor in state.items()
        if tensor.numel() == 0 or name in by_storage.values()
    }


def gather_into(spare: torch.nn.Module, partitioned: torch.nn.Module) -> None:
    """Copies the partitioned weights into `spare`. Under ZeRO-3 each rank holds a part of every
    weight, and hooks that let go of gathered ones: a copy is safe to use."""
    from deepspeed.runtime.zero import GatheredParameters

    parameters = list(partitioned.parameters())
    with torch.no_grad(), GatheredParameters(parameters):
        for own, whole in zip(spare.parameters(), parameters, strict=True):
            own.copy_(whole)
