"""EAGLE-1 for vLLM and SGLang. The two differ in one tensor: SGLang's projection has a bias, vLLM's
has none and refuses one."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

from draftsmith.drafters.heads.eagle1 import ARCHITECTURES
from draftsmith.drafters.weights import read_weights, write_weights
from draftsmith.errors import UserError
from draftsmith.train.export.layouts.eagle3 import scales_its_embeddings
from draftsmith.train.export.layouts.source import Source, check_fits, check_sees_all, check_shapes

VLLM, SGLANG = ARCHITECTURES


def write_vllm(source: Source, out: Path) -> None:
    # Its layer counts behind the target's, past the end of the draft's own kinds.
    check_sees_all(source, "vLLM's EAGLE-1")
    tensors = checked(source)
    bias = tensors.pop("fc.bias", None)
    if bias is not None and bool(bias.any()):
        raise UserError(
            "the draft's fc has a bias, which vLLM's EAGLE-1 cannot express; export it --to sglang"
        )
    write_weights(out, {**source.config, "architectures": [VLLM], "bias": False}, tensors)


def write_sglang(source: Source, out: Path) -> None:
    check_sees_all(source, "SGLang")
    tensors = checked(source)
    tensors.setdefault("fc.bias", torch.zeros_like(tensors["fc.weight"][:, 0]))
    write_weights(out, {**source.config, "architectures": [SGLANG], "bias": True}, tensors)


def checked(source: Source) -> dict[str, torch.Tensor]:
    """The draft's tensors, once names and shapes are what engines expect: SGLang would serve random
    numbers for others."""
    config, tensors = source.config, read_weights(source.draft)
    check_fits(source, vocab_size=config.get("vocab_size"), hidden_size=config.get("hidden_size"))
    if "embed_tokens.weight" not in tensors and scales_its_embeddings(source):
        raise UserError(
            f"{source.target_name!r} scales its token embeddings, which engines do not do for a "
            "draft that shares them; "
            "save the draft with embeddings of its own"
        )
    expected, hidden = expected_shapes(config), config["hidden_size"]
    optional = {"fc.bias": (hidden,), "embed_tokens.weight": (config["vocab_size"], hidden)}
    check_shapes({name: tuple(tensor.shape) for name, tensor in tensors.items()}, expected)
    for name, tensor in tensors.items():
        if name not in expected and optional.get(name) != tuple(tensor.shape):
            raise UserError(
                f"weight {name!r} of shape {list(tensor.shape)} has no place in the EAGLE-1 "
                "layout; remove it"
            )
    return tensors


def expected_shapes(config: dict[str, Any]) -> dict[str, tuple[int, ...]]:
    hidden, inner = config["hidden_size"], config["intermediate_size"]
    queries, keys = (
        config[heads] * config["head_dim"]
        for heads in ("num_attention_heads", "num_key_value_heads")
    )
    return {
        "fc.weight": (hidden, 2 * hidden),
        "layers.0.self_attn.q_proj.weight": (queries, hidden),
        "layers.0.self_attn.k_proj.weight": (keys, hidden),
        "layers.0.self_attn.v_proj.weight": (keys, hidden),
        "layers.0.self_attn.o_proj.weight": (hidden, queries),
        "layers.0.mlp.gate_proj.weight": (inner, hidden),
        "layers.0.mlp.up_proj.weight": (inner, hidden),
        "layers.0.mlp.down_proj.weight": (hidden, inner),
        "layers.0.post_attention_layernorm.weight": (hidden,),
    }
