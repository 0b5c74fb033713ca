"""AdamW of which every rank holds a part: DeepSpeed's ZeRO-1, and ZeRO-2, which parts the gradients
too.

Weights stay whole everywhere, and rank 0's count: it scores and publishes them, may exchange them,
and sends them before each step. So ranks can fall out of step in nothing but the moments, which
only steps, `fill` and `forget` change, on all alike.
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist

from draftsmith.distill.config import LearnConfig
from draftsmith.distill.learn.gradients import OwnGradients
from draftsmith.distill.learn.optimizer import new_adam, trained
from draftsmith.distill.learn.shares import Shares, add_up, send_weights
from draftsmith.drafters.target.ranks import LEADER, meeting
from draftsmith.errors import UserError
from draftsmith.train.data.roles import Row
from draftsmith.train.objective.unrolled_loss import StepSums
from draftsmith.train.quiet import quiet_deepspeed
from draftsmith.train.resolve import deepspeed_config, zero_stage

MOMENTS = ("exp_avg", "exp_avg_sq")


class Share(torch.nn.Module):
    """DeepSpeed wants a forward."""

    def __init__(self, own: OwnGradients, drafter: torch.nn.Module):
        super().__init__()
        self.own, self.drafter = own, drafter

    def forward(self, rows: Sequence[Row], weight: float) -> tuple[torch.Tensor, StepSums]:
        return self.own.share(self.drafter, rows, weight)


class ZeroPart:
    """This rank's of one candidate's optimizer. Every rank makes every call."""

    def __init__(
        self, own: OwnGradients, drafter: torch.nn.Module, config: LearnConfig, deepspeed: str
    ):
        if own.target.device.type == "cpu":
            os.environ.setdefault("DS_ACCELERATOR", "cpu")
        quiet_deepspeed()
        import deepspeed as library

        self.drafter, self.parameters = drafter, trained(drafter)
        self.engine, *_ = library.initialize(
            model=Share(own, drafter),
            optimizer=new_adam(drafter, config),
            config=settings(
                deepspeed,
                clip=config.clip,
                size=sum(one.numel() for one in self.parameters.values()),
            ),
        )
        self._make_moments()

    def _make_moments(self) -> None:
        """AdamW makes them in its first step; `fill` needs them before."""
        self._at_rate(0.0)
        self.engine.backward(0.0 * sum(parameter.sum() for parameter in self.parameters.values()))
        self.engine.step()
        self.forget()

    def _at_rate(self, lr: float) -> None:
        for group in self.engine.optimizer.param_groups:
            group["lr"] = lr

    @property
    def state(self) -> dict[str, torch.Tensor]:
        """Of this rank's part of all parameters, which are one tensor there."""
        return next(iter(self.engine.optimizer.state.values()))

    def step(self, shares: Shares, lr: float) -> StepSums | None:
        send_weights(self.drafter)
        # Those that the optimizer keeps of its part.
        self.engine.optimizer.refresh_fp32_params()
        self._at_rate(lr)
        loss, sums = self.engine(shares.own, shares.weight)
        # The engine takes the mean over ranks of what is a sum.
        self.engine.backward(loss * dist.get_world_size())
        self.engine.step()
        add_up(sums)
        return sums if self.engine.was_step_applied() else None

    def moments(self) -> dict[str, torch.Tensor]:
        """Rank 0 has them whole when it returns."""
        from deepspeed.utils import safe_get_full_optimizer_state

        found: dict[str, torch.Tensor] = {}
        if not self.state["step"]:
            return found
        for name, parameter in self.parameters.items():
            for moment in MOMENTS:
                with meeting():
                    whole = safe_get_full_optimizer_state(parameter, moment)
                if dist.get_rank() == LEADER:
                    found[f"{name}:{moment}"] = whole.cpu()
            found[f"{name}:step"] = self.state["step"]
        return found

    def fill(self, moments: Mapping[str, torch.Tensor]) -> None:
        from deepspeed.utils import safe_set_full_optimizer_state

        self.forget()
        for key, value in moments.items():
            name, _, moment = key.rpartition(":")
            if moment == "step":
                self.state["step"].fill_(value)
            else:
                safe_set_full_optimizer_state(
                    self.parameters[name], value.to(self.parameters[name].device), moment
                )

    def forget(self) -> None:
        for value in self.state.values():
            value.zero_()

    def close(self) -> None:
        self.engine.destroy()


def settings(path: str, *, clip: float, size: int) -> dict[str, Any]:
    """Of the file its ZeRO section; what else it may hold are the learner's own options. `size` is
    of the trained parameters."""
    section = deepspeed_config(path)["zero_optimization"]
    zero = {name: value for name, value in section.items() if value != "auto"}
    return {
        # By default a bucket has 500 million numbers, allocated whatever the draft's size.
        "zero_optimization": {"reduce_bucket_size": size, **zero},
        "zero_force_ds_cpu_optimizer": False,
        "gradient_clipping": clip,
        "train_micro_batch_size_per_gpu": 1,
        "steps_per_print": 1_000_000_000,
    }


def check(path: str) -> None:
    if (stage := zero_stage(path)) not in (1, 2):
        raise UserError(
            f"option 'deepspeed' is {path!r} of ZeRO stage {stage}, but rank 0 scores and "
            "publishes whole weights; give "
            "recipes/zero1.json or recipes/zero2.json"
        )
    if int(os.environ.get("WORLD_SIZE", "1")) == 1:
        raise UserError(
            f"option 'deepspeed' is {path!r} but there is one process, which has nobody to share "
            "an optimizer with; start "
            "several by torchrun --nproc_per_node"
        )
