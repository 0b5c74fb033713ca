"""EAGLE-1 for vLLM and SGLang, and as the type `eagle` of the `speculators` library.

The two engines differ in one tensor: SGLang's projection has a bias, vLLM's has none and refuses
one.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

from draftsmith.drafters.draft_shape import rope_of
from draftsmith.drafters.heads.eagle1 import ARCHITECTURES
from draftsmith.drafters.weights import read_weights, write_weights
from draftsmith.errors import UserError
from draftsmith.train.export.layouts.eagle3 import (
    SPECULATORS_VERSION,
    scales_its_embeddings,
    speculators_plan,
)
from draftsmith.train.export.layouts.source import (
    Source,
    check_fits,
    check_sees_all,
    check_shapes,
    target_tensor,
    text_config,
)

VLLM, SGLANG = ARCHITECTURES
SPECULATORS = {"fc.": "fusion_fc.", "layers.0.": "transformer."}
EMBEDDINGS = "embed_tokens.weight"
NORMS = (  # of a draft with `layernorms`
    "embedding_layernorm.weight",
    "layers.0.input_layernorm.weight",
    "pre_lm_head_layernorm.weight",
)


def write_vllm(source: Source, out: Path) -> None:
    # Its layer counts behind the target's, past the end of the draft's own kinds.
    check_sees_all(source, "vLLM's EAGLE-1")
    check_has_no_norms(source, "vLLM")
    tensors = checked(source)
    bias = tensors.pop("fc.bias", None)
    if bias is not None and bool(bias.any()):
        raise UserError(
            "the draft's fc has a bias, which vLLM's EAGLE-1 cannot express; export it --to sglang"
        )
    write_weights(out, {**source.config, "architectures": [VLLM], "bias": False}, tensors)


def write_sglang(source: Source, out: Path) -> None:
    check_sees_all(source, "SGLang")
    check_has_no_norms(source, "SGLang")
    tensors = checked(source)
    tensors.setdefault("fc.bias", torch.zeros_like(tensors["fc.weight"][:, 0]))
    write_weights(out, {**source.config, "architectures": [SGLANG], "bias": True}, tensors)


def write_speculators(source: Source, out: Path) -> None:
    """As the library's releases from 0.1 to 0.6 load it."""
    check_sees_all(source, "the speculators library")
    check_rotary(source)
    tensors = checked(source)
    check_shares_embeddings(source, tensors.pop(EMBEDDINGS, None))
    config = speculators_config(source, bias="fc.bias" in tensors)
    write_weights(out, config, {speculators_name(name): one for name, one in tensors.items()})


def speculators_config(source: Source, *, bias: bool) -> dict[str, Any]:
    outer = ("architectures", "bias", "layernorms", "dtype", "torch_dtype")
    layer = {key: value for key, value in source.config.items() if key not in outer}
    return {
        "architectures": ["EagleSpeculator", "LlamaDecoderLayer"],
        "speculators_model_type": "eagle",
        "speculators_version": SPECULATORS_VERSION,
        "dtype": source.config.get("dtype", "float32"),
        "transformer_layer_architecture": "LlamaDecoderLayer",
        "transformer_layer_config": layer | {"model_type": "llama"},
        "fusion_bias": bias,
        "layernorms": has_norms(source.config),
        "tie_word_embeddings": False,
        "speculators_config": speculators_plan(source, "eagle"),
    }


def speculators_name(name: str) -> str:
    for ours, theirs in SPECULATORS.items():
        if name.startswith(ours):
            return theirs + name.removeprefix(ours)
    return name


def has_norms(config: dict[str, Any]) -> bool:
    return bool(config.get("layernorms"))


def check_has_no_norms(source: Source, engine: str) -> None:
    if has_norms(source.config):
        raise UserError(
            f"the draft has layernorms=True, norms that {engine}'s EAGLE-1 has not; export it --to "
            "speculators"
        )


def check_rotary(source: Source) -> None:
    """The library's model turns the heads as the target does, whatever the draft's config says."""
    target = text_config(source.target_config)
    whole = {"rope_theta": 10000.0, "rope_scaling": None, **source.config}
    width = target.get("head_dim") or target["hidden_size"] // target["num_attention_heads"]
    for key, theirs in {**rope_of(target), "head_dim": width}.items():
        if whole[key] != theirs:
            raise UserError(
                f"the draft has {key}={whole[key]!r} and {source.target_name!r} {theirs!r}, with "
                "which the speculators library would run the draft; export it --to vllm"
            )
    rope = target.get("rope_parameters") or target
    kinds = [key for key, value in rope.items() if key.endswith("_attention") and value]
    if kinds or rope.get("partial_rotary_factor", 1.0) != 1.0:
        raise UserError(
            f"{source.target_name!r} has a partial rotary embedding or one for each kind of layer, "
            "with which the speculators library would run the draft; export it --to vllm"
        )


def check_shares_embeddings(source: Source, own: torch.Tensor | None) -> None:
    """The library's model takes the target's embeddings: a copy may be left out, others not."""
    if own is None:
        return
    theirs = target_tensor(source, EMBEDDINGS)
    if own.shape != theirs.shape or not torch.equal(own, theirs.to(own.dtype)):
        raise UserError(
            f"the draft has embeddings of its own and the speculators library takes those of "
            f"{source.target_name!r} for them; export it --to vllm"
        )


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
        **(dict.fromkeys(NORMS, (hidden,)) if has_norms(config) else {}),
    }
