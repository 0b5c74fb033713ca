"""How a checkpoint names an MTP module that it stores as one more decoder layer, number L of a target of L layers.

transformers stacks the experts of a layer, checkpoints hold each by itself.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

import torch

from draftsmith.errors import UserError

# Whether the module, drafting on, reads its state after its norm. Engines differ for GLM (SGLang and transformers read the normed
# one); these are vLLM's ways, which reads our exports.
FEEDS_NORMED = {"deepseek_v3": True, "glm4_moe": False, "glm4_moe_lite": False}
# Copies of the target's tables. vLLM, too, takes the target's own for them.
SHARED = ("embed_tokens.weight", "shared_head.head.weight")
OURS = ("enorm.weight", "hnorm.weight", "eh_proj.weight")
NORM, THEIR_NORM, LAYER = "norm.weight", "shared_head.norm.weight", "layer."
EXPERT = re.compile(r"mlp\.experts\.(\d+)\.(gate|up|down)_proj\.weight")
GATE_UP, DOWN = "mlp.experts.gate_up_proj", "mlp.experts.down_proj"


def is_appended(config: Mapping[str, Any]) -> bool:
    return config.get("model_type") in FEEDS_NORMED and bool(config.get("num_nextn_predict_layers"))


def prefix_of(config: Mapping[str, Any]) -> str:
    return f"model.layers.{config['num_hidden_layers']}."


def own_names(tensors: Mapping[str, torch.Tensor], where: str) -> dict[str, torch.Tensor]:
    """From published names, without their prefix, to those of our module."""
    renamed = {}
    for name, tensor in stacked_experts(tensors, where).items():
        if name == THEIR_NORM:
            renamed[NORM] = tensor
        elif name not in SHARED and not name.endswith("rotary_emb.inv_freq"):
            renamed[name if name in OURS else LAYER + name] = tensor
    return renamed


def published_names(tensors: Mapping[str, torch.Tensor], prefix: str) -> dict[str, torch.Tensor]:
    """The inverse, with `prefix`; what is shared with the target is not among them."""
    theirs = {THEIR_NORM if name == NORM else name.removeprefix(LAYER): tensor for name, tensor in tensors.items()}
    return {prefix + name: tensor for name, tensor in single_experts(theirs).items()}


def stacked_experts(tensors: Mapping[str, torch.Tensor], where: str) -> dict[str, torch.Tensor]:
    """Each expert's gate and up [I, H] and down [H, I] -> [E, 2 I, H] and [E, H, I]; a dense layer as it is."""
    stacked = {name: tensor for name, tensor in tensors.items() if not EXPERT.fullmatch(name)}
    numbers = {int(found[1]) for name in tensors if (found := EXPERT.fullmatch(name))}
    if not numbers:
        return stacked

    def projection(number: int, kind: str) -> torch.Tensor:
        name = f"mlp.experts.{number}.{kind}_proj.weight"
        if name not in tensors:
            raise UserError(f"weight {name!r} of the MTP module is missing in {where!r}; restore the folder")
        return tensors[name]

    experts = range(max(numbers) + 1)
    halves = [torch.cat([projection(number, "gate"), projection(number, "up")]) for number in experts]
    return {**stacked, GATE_UP: torch.stack(halves), DOWN: torch.stack([projection(number, "down") for number in experts])}


def single_experts(tensors: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """The inverse."""
    single = {name: tensor for name, tensor in tensors.items() if name not in (GATE_UP, DOWN)}
    if GATE_UP not in tensors:
        return single
    for number, (gate_up, down) in enumerate(zip(tensors[GATE_UP], tensors[DOWN], strict=True)):
        gate, up = gate_up.chunk(2)
        for kind, tensor in (("gate", gate), ("up", up), ("down", down)):
            single[f"mlp.experts.{number}.{kind}_proj.weight"] = tensor
    return single
