"""A draft's optimizer steps made by several processes: each computes the gradient of its rows of a
batch, and accelerate adds them up.

Without DeepSpeed each process holds the whole draft and makes the same step. With it (ZeRO-1, 2 and
3) each holds a part of the moments, of the gradients and of the weights. The target is no submodule
of what is trained, so neither of them sees it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager
from typing import Any

import torch
import torch.distributed as dist
from accelerate import Accelerator, PartialState
from accelerate.utils import DeepSpeedPlugin
from transformers.integrations.deepspeed import unset_hf_deepspeed_config

from draftsmith.distill.config import LearnConfig
from draftsmith.distill.learn.optimizer import CandidateOptimizer, Trained, trained
from draftsmith.distill.learn.teachers import Batch, Share
from draftsmith.drafters.target.ranks import LEADER
from draftsmith.train.objective.unrolled_loss import StepSums, UnrolledLoss
from draftsmith.train.resolve import deepspeed_config

MOMENTS = ("exp_avg", "exp_avg_sq")  # Adam's, each as large as the weights
# Sections of a DeepSpeed config that the learner's own options stand for.
OWN = ("optimizer", "scheduler", "bf16", "fp16")

Tensors = Mapping[str, torch.Tensor]
Shapes = dict[str, torch.Size]
Steps = Mapping[str, int]  # that Adam has made, by the names of parameters


class ShareLoss(torch.nn.Module):
    """The trained parameters, with a forward that returns a share's part of the batch's loss, and
    its `StepSums`."""

    def __init__(self, drafter: torch.nn.Module, unrolled: Callable[[Share], UnrolledLoss]):
        super().__init__()
        self.drafter, self._unrolled = drafter, unrolled

    def forward(self, share: Share) -> tuple[torch.Tensor, torch.Tensor]:
        """The loss, and [4, S] float64."""
        found = self._unrolled(share)
        loss = found.total / (found.scale * share.weight)
        return loss, torch.stack([one.detach().double() for one in found.sums])


class Replicated(CandidateOptimizer):
    """A whole copy of the draft on each process."""

    def __init__(
        self,
        drafter: torch.nn.Module,
        config: LearnConfig,
        accelerator: Accelerator,
        example: Share,
    ):
        super().__init__(drafter, config)
        self.accelerator, self.shapes = accelerator, shapes_of(drafter)
        # A step waits for the gradient of each parameter that requires one while this is made.
        idle = untouched(self, example)
        for parameter in idle:
            parameter.requires_grad_(False)
        self.model = accelerator.prepare_model(ShareLoss(drafter, self.unrolled))
        release_prepared(accelerator)
        for parameter in idle:
            parameter.requires_grad_(True)

    def _backward(self, batch: Batch | Share) -> StepSums:
        loss, sums = self.model(batch)
        # Processes average their gradients, and the weight already counts the rows of all.
        self.accelerator.backward(loss * self.accelerator.num_processes)
        return StepSums(*self.accelerator.reduce(sums))

    @torch.no_grad()
    def set_weights(self, weights: Tensors | None) -> None:
        own = dict(self.drafter.named_parameters())
        for name, value in from_leader(weights, self.shapes, self.device):
            own[name].copy_(value)

    def set_moments(self, steps: Steps, moments: Tensors | None) -> None:
        shapes = {f"{name}:{key}": self.shapes[name] for name in steps for key in MOMENTS}
        found = dict(from_leader(moments, shapes, self.device))
        counts = {f"{name}:step": torch.tensor(float(step)) for name, step in steps.items()}
        self.fill(found | counts)

    def copy_to(self, whole: Trained | None) -> None:
        """`whole` on the first process is this copy's own weights."""

    def close(self) -> None:
        """Nothing outlives a copy."""


class Partitioned(CandidateOptimizer):
    """A part of the draft on each process, by DeepSpeed."""

    def __init__(
        self,
        drafter: torch.nn.Module,
        config: LearnConfig,
        accelerator: Accelerator,
        example: Share,
    ):
        """`drafter` is this part's own."""
        super().__init__(drafter, config)
        self.accelerator, self.shapes = accelerator, shapes_of(drafter)
        # DeepSpeed takes a missing gradient for 0, and lets the weight decay go on.
        for parameter in untouched(self, example):
            parameter.requires_grad_(False)
        self.forget()
        self.engine, _ = accelerator.prepare(ShareLoss(drafter, self.unrolled), self.adam)
        release_prepared(accelerator)
        unpartitioned()

    def step(self, batch: Batch | Share, *, lr: float) -> StepSums | None:
        for group in self.engine.optimizer.param_groups:
            group["lr"] = lr
        loss, sums = self.engine(batch)
        self.engine.backward(loss * self.accelerator.num_processes)
        self.engine.step()
        sums = self.accelerator.reduce(sums)
        return StepSums(*sums) if self.engine.was_step_applied() else None

    @property
    def _states(self) -> list[dict[str, Any]]:
        """Adam's own, one for each of this process's flat parts; none before the first step."""
        return list(self.engine.optimizer.optimizer.state.values())

    @torch.no_grad()
    def set_weights(self, weights: Tensors | None) -> None:
        own = dict(self.drafter.named_parameters())
        for name, value in from_leader(weights, self.shapes, self.device):
            with gathered([own[name]], modified=True):
                own[name].copy_(value)
        self.engine.optimizer.refresh_fp32_params()

    @torch.no_grad()
    def set_moments(self, steps: Steps, moments: Tensors | None) -> None:
        """There must have been a step, at learning rate 0 perhaps: DeepSpeed makes the moments in
        it."""
        from deepspeed.utils import safe_set_full_optimizer_state

        for state in self._states:
            for key in MOMENTS:
                state[key].zero_()
            state["step"].fill_(max(steps.values(), default=0))
        own = trained(self.drafter)
        names = [name for name in steps if name in own]
        shapes = {f"{name}:{key}": self.shapes[name] for name in names for key in MOMENTS}
        for entry, value in from_leader(moments, shapes, self.device):
            name, _, key = entry.rpartition(":")
            safe_set_full_optimizer_state(own[name], value, key)

    @property
    def has_moments(self) -> bool:
        return bool(self._states)

    def moments(self) -> dict[str, torch.Tensor]:
        """Every process must call it."""
        from deepspeed.utils import safe_get_full_optimizer_state

        if not self.has_moments:
            return {}
        step = torch.tensor(float(self._states[0]["step"]))
        found: dict[str, torch.Tensor] = {}
        for name, parameter in trained(self.drafter).items():
            for key in MOMENTS:
                value = safe_get_full_optimizer_state(parameter, key)
                found[f"{name}:{key}"] = value.view(self.shapes[name]).cpu()
            found[f"{name}:step"] = step
        return found

    @torch.no_grad()
    def copy_to(self, whole: Trained | None) -> None:
        """Copies the weights into `whole`, which the first process gives. Every one must call
        it."""
        for name, parameter in trained(self.drafter).items():
            with gathered([parameter]):
                if whole is not None:
                    whole[name].copy_(parameter)

    def close(self) -> None:
        """Ends the engine, which its hooks on parameters, and ZeRO-3's list of modules, would keep
        as long as the process, and with it the draft and the target."""
        from deepspeed.runtime.zero import parameter_offload

        self.engine.destroy()
        roots = parameter_offload.FWD_MODULE_STACK
        roots[:] = [module for module in roots if module is not self.engine.module]


Part = Replicated | Partitioned


def from_leader(
    values: Tensors | None, shapes: Shapes, device: torch.device
) -> Iterator[tuple[str, torch.Tensor]]:
    """Tensors of the first process on all, one after another. Each must go through all of them."""
    for name, shape in shapes.items():
        value = torch.empty(shape, device=device)
        if values is not None:
            value.copy_(values[name])
        dist.broadcast(value, LEADER)
        yield name, value


def untouched(optimizer: CandidateOptimizer, share: Share) -> list[torch.nn.Parameter]:
    """Trained parameters that no step moves, whatever its texts: of Medusa's heads those that
    `learn.unroll.steps` does not reach."""
    own = list(trained(optimizer.drafter).values())
    found = torch.autograd.grad(optimizer.unrolled(share).total, own, allow_unused=True)
    return [one for one, gradient in zip(own, found, strict=True) if gradient is None]


def shapes_of(drafter: torch.nn.Module) -> Shapes:
    return {name: parameter.shape for name, parameter in drafter.named_parameters()}


def gathered(
    parameters: list[torch.nn.Parameter], *, modified: bool = False
) -> AbstractContextManager[None]:
    """Around a use of whole weights, whatever ZeRO has partitioned."""
    from deepspeed.runtime.zero import GatheredParameters

    return GatheredParameters(parameters, modifier_rank=LEADER if modified else None)


def new_accelerator(config: LearnConfig, device: torch.device) -> Accelerator:
    """One for all drafts of this process, whose group exists."""
    # First, as transformers does: asked for a CPU, an accelerator makes no use of DeepSpeed, and
    # without being asked it takes a process on a CPU to be alone.
    PartialState(cpu=device.type == "cpu")
    if config.deepspeed is None:
        return Accelerator(cpu=device.type == "cpu")
    plugin = DeepSpeedPlugin(hf_ds_config=engine_config(config, dist.get_world_size()))
    accelerator = Accelerator(deepspeed_plugin=plugin)
    unpartitioned()
    return accelerator


def release_prepared(accelerator: Accelerator) -> None:
    """Drops what accelerate holds, for uses of its own, of all that it has prepared: a draft, and
    through it a target, would live as long as the process. `free_memory` ends the engines too."""
    accelerator._models.clear()
    accelerator._optimizers.clear()
    accelerator.deepspeed_engine_wrapped = None


def unpartitioned() -> None:
    """Has what transformers loads from here on, drafts and targets, whole under ZeRO-3 too."""
    unset_hf_deepspeed_config()


def engine_config(config: LearnConfig, processes: int) -> dict[str, Any]:
    """The DeepSpeed config at `learn.deepspeed`, with the learner's own options in it."""
    given = deepspeed_config(config.deepspeed) or {}
    kept = {name: value for name, value in given.items() if name not in OWN}
    sizes = kept["zero_optimization"].items()
    return kept | {
        "zero_optimization": {name: value for name, value in sizes if value != "auto"},
        "gradient_clipping": config.max_grad_norm,
        "gradient_accumulation_steps": 1,
        # Of no meaning here: the loss is of the whole batch.
        "train_micro_batch_size_per_gpu": 1,
        "train_batch_size": processes,
    }
