"""Low-rank adapters on the live draft language model as a candidate.

Adapters mean nothing without the weights under them, which are the live version's. Whenever another
version goes live, they are merged there or dropped, and begin anew.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch

from draftsmith.drafters.lm.draft_lm import DraftLm
from draftsmith.drafters.lm.lora import add_adapters, reset_adapters
from draftsmith.drafters.options import LoraOptions
from draftsmith.errors import UserError


def adapt(drafter: torch.nn.Module, options: LoraOptions, *, seed: int) -> None:
    """Adds adapters in place: only they are trained from here on."""
    if options.dropout:
        raise UserError(
            f"learn.lora.dropout is {options.dropout}; online learning draws nothing at random, "
            "so leave it at 0"
        )
    if not isinstance(drafter, DraftLm):
        raise UserError(
            f"learn.lora is given with a draft of family {drafter.family!r}; only a draft-lm "
            "takes adapters"
        )
    add_adapters(drafter.model, options)
    reset_adapters(drafter.model, seed=seed)


@torch.no_grad()
def rebase(drafter: torch.nn.Module, weights: Mapping[str, torch.Tensor], *, seed: int) -> None:
    """Loads weights of a draft without adapters, under adapters that begin anew."""
    assert isinstance(drafter, DraftLm)
    own = drafter.state_dict()
    for name, values in weights.items():
        module, _, leaf = name.rpartition(".")
        own[name if name in own else f"{module}.base_layer.{leaf}"].copy_(values)
    reset_adapters(drafter.model, seed=seed)
