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

LAYER_NORMS = ("input_layernorm", "post_attention_layernorm")
BLOCK_NORMS = (*LAYER_NORMS, "self_attn.q_norm", "self_attn.k_norm")  # of a Qwen3 layer
Shapes = dict[str, tuple[int, ...]]


class Understood(NamedTuple):
    """The draft that the engine would run, as a checkpoint of ours."""

    config: dict[str, Any]
    tensors: dict[str, torch.Tensor]


# (the exported folder, the target's config.json) -> what the engine makes of it; a folder where it
# loads that as we do.
Reader = Callable[[Path, dict[str, Any]], Understood | Path]


def filled(
    engine: str,
    tensors: Mapping[str, torch.Tensor],
    shapes: Shapes,
    *,
    optional: Shapes | None = None,
    strict: bool = True,
    named: Callable[[str], str | None] | None = None,
) -> dict[str, torch.Tensor]:
    """Every parameter of an engine's module by its name, once the weights are loaded; raises for one
    that would keep random numbers. `optional` are parameters that the engine takes from the target
    where the folder has none. `named` gives the parameter of a tensor, or None where the engine
    passes it over; one that is not `strict` passes all unknown names over."""
    known, found = {**shapes, **(optional or {})}, {}
    for stored, tensor in tensors.items():
        name = stored if named is None else named(stored)
        if name is None or (name not in known and not strict):
            continue
        assert name in known, f"{engine} has no parameter {name!r}"
        assert tuple(tensor.shape) == known[name], name
        found[name] = tensor
    missing = shapes.keys() - found.keys()
    assert not missing, f"{engine} finds no weight for {missing}"
    return found


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
        "self_attn.q_proj.weight": (queries, read),
        "self_attn.k_proj.weight": (keys, read),
        "self_attn.v_proj.weight": (keys, read),
        "self_attn.o_proj.weight": (hidden, queries),
        **gated("mlp", inner, hidden),
    }
    for name in norms:
        shapes[f"{name}.weight"] = (width if name.startswith("self_attn") else hidden,)
    return {prefix + name: shape for name, shape in shapes.items()}


def gated(name: str, inner: int, hidden: int) -> Shapes:
    shapes: Shapes = {f"{name}.{kind}_proj.weight": (inner, hidden) for kind in ("gate", "up")}
    return {**shapes, f"{name}.down_proj.weight": (hidden, inner)}


def block_shapes(config: Mapping[str, Any], num_taps: int, width: int) -> tuple[Shapes, Shapes]:
    """Parameters of a DFlash or DSpark block over taps of a `width`, and of its guess of its own
    acceptance."""
    hidden, rank = config["hidden_size"], config.get("markov_rank") or 0
    shapes: Shapes = {
        "fc.weight": (hidden, num_taps * width),
        "hidden_norm.weight": (hidden,),
        "norm.weight": (hidden,),
    }
    for layer in range(config["num_hidden_layers"]):
        shapes |= decoder_layer(f"layers.{layer}.", config, norms=BLOCK_NORMS)
    if rank:
        for table in ("markov_w1", "markov_w2"):
            shapes[f"markov_head.{table}.weight"] = (config["vocab_size"], rank)
    if not config.get("enable_confidence_head"):
        return shapes, {}
    read = hidden + (rank if config.get("confidence_head_with_markov") else 0)
    head = "confidence_head.proj"
    return shapes, {f"{head}.weight": (1, read), f"{head}.bias": (1,)}


def renamed(tensors: Mapping[str, torch.Tensor], old: str, new: str) -> dict[str, torch.Tensor]:
    """Every name with the prefix `old` gets `new` for it; others are left out."""
    return {
        new + name.removeprefix(old): tensor
        for name, tensor in tensors.items()
        if name.startswith(old)
    }


def in_layer_order(raw: list[int], num_layers: int) -> list[int]:
    """Engines collect the tapped states on their way through the layers, whatever order the config
    names them in."""
    assert raw and min(raw) >= 0 and max(raw) < num_layers
    return sorted(set(raw))
