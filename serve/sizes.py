"""How many bytes of weights a step of target and draft reads: what its time is where memory bandwidth is the limit."""

from __future__ import annotations

from torch import nn

from draftsmith.drafters.interface import ServingDrafter
from draftsmith.drafters.target import Target


def target_bytes(target: Target) -> int:
    """Every weight but the input embedding, of which a pass reads a few rows."""
    return _read_whole(target.model, target.output_weight)


def draft_bytes(drafter: ServingDrafter | None) -> int:
    """One step of drafting; 0 for drafters without weights. A head borrowed from the target is read all the same."""
    if not isinstance(drafter, nn.Module):
        return 0
    return _read_whole(drafter, drafter.head_weight())


def _read_whole(model: nn.Module, head: nn.Parameter) -> int:
    tables = {id(module.weight) for module in model.modules() if isinstance(module, nn.Embedding)}
    weights = {id(weight): weight for weight in model.parameters() if id(weight) not in tables}
    weights[id(head)] = head
    return sum(weight.numel() * weight.element_size() for weight in weights.values())
