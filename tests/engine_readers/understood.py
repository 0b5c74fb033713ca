"""A folder as an engine's loader sees it: which parameters its module has, which tensors fill them,
which layers it taps.

Readers are written from the engines' sources (vLLM 0.32, SGLang 0.5.23, llama.cpp b11434) and share
nothing with the writers in `train/export`: what both got wrong alike would not show.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import torch

from draftsmith.drafters.interface import ServingDrafter
from draftsmith.errors import UserError

LAYER_NORMS = ("input_layernorm", "post_attention_layernorm")
BLOCK_NORMS = (*LAYER_NORMS, "self_attn.q_norm", "self_attn.k_norm")  # of a Qwen3 layer
Shapes = dict[str, tuple[int, ...]]


class Understood(NamedTuple):
    """The draft that the engine would run, as a checkpoint of ours."""

    config: dict[str, Any]
    tensors: dict[str, torch.Tensor]
    target: Path | None = None  # where the engine finds the target, if that is part of the export


# (the exported folder, the target's config.json) -> what the engine makes of it; a folder where it
# loads that as we do, a drafter where it runs a graph of its own.
Reader = Callable[[Path, dict[str, Any]], Understood | Path | ServingDrafter]


class Parameters:
    """An engine's module while its weights are loaded."""

    def __init__(
        self, engine: str, shapes: Shapes, *, optional: Shapes | None = None, strict: bool
    ):
        """`optional` are parameters that the engine takes from the target where the folder has
        none. One that is not `strict` skips unknown names silently."""
        self.engine, self.strict = engine, strict
        self.needed, self.shapes = set(shapes), {**shapes, **(optional or {})}
        self.filled: dict[str, torch.Tensor] = {}

    def fill(self, name: str, tensor: torch.Tensor) -> None:
        if name not in self.shapes:
            if self.strict:
                raise UserError(
                    f"{self.engine} has no parameter {name!r} for a weight of the export; the "
                    "layout is wrong"
                )
            return
        if tuple(tensor.shape) != self.shapes[name]:
            raise UserError(
                f"{self.engine} makes parameter {name!r} of shape {list(self.shapes[name])} and "
                "the export has "
                f"{list(tensor.shape)}; the layout is wrong"
            )
        self.filled[name] = tensor

    def loaded(self) -> dict[str, torch.Tensor]:
        """Every parameter by its name; raises for one that would keep random numbers."""
        if missing := sorted(self.needed - self.filled.keys()):
            raise UserError(
                f"{self.engine} finds no weight for its parameter {missing[0]!r} in the export; "
                "the layout is wrong"
            )
        return self.filled


def decoder_layer(
    prefix: str, config: Mapping[str, Any], *, norms: Iterable[str], wide: bool = False
) -> Shapes:
    """The parameters of one decoder layer; `wide` attention reads embedding and state
    side by side."""
    hidden, inner = config["hidden_size"], config["intermediate_size"]
    width = config.get("head_dim") or hidden // config["num_attention_heads"]
    queries, keys = config["num_attention_heads"] * width, config["num_key_value_heads"] * width
    read = 2 * hidden if wide else hidden
    shapes: Shapes = {
        "self_attn.q_proj": (queries, read),
        "self_attn.k_proj": (keys, read),
        "self_attn.v_proj": (keys, read),
        "self_attn.o_proj": (hidden, queries),
        "mlp.gate_proj": (inner, hidden),
        "mlp.up_proj": (inner, hidden),
        "mlp.down_proj": (hidden, inner),
    }
    shapes |= {name: (width if name.startswith("self_attn") else hidden,) for name in norms}
    return {f"{prefix}{name}.weight": shape for name, shape in shapes.items()}


def renamed(tensors: Mapping[str, torch.Tensor], old: str, new: str) -> dict[str, torch.Tensor]:
    """Every name with the prefix `old` gets `new` for it; others are left out."""
    return {
        new + name.removeprefix(old): tensor
        for name, tensor in tensors.items()
        if name.startswith(old)
    }


def in_layer_order(raw: list[int], num_layers: int, engine: str) -> list[int]:
    """Engines collect the tapped states on their way through the layers, whatever order the config
    names them in."""
    if not raw or min(raw) < 0 or max(raw) >= num_layers:
        raise UserError(
            f"{engine} cannot tap the inputs of layers {raw} in a target of {num_layers}; train "
            "with taps below that"
        )
    return sorted(set(raw))
