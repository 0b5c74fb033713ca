"""DFlash and DSpark as vLLM and SGLang read them alike: the checkpoint as it is, once it is what
they expect; and in the `speculators` layout."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

from draftsmith.drafters.blocks.shape import block_values, check_block, shape_in
from draftsmith.drafters.weights import read_weights, write_weights
from draftsmith.errors import UserError
from draftsmith.train.export.layouts.eagle3 import (
    SPECULATORS_VERSION,
    scales_its_embeddings,
    speculators_plan,
)
from draftsmith.train.export.layouts.source import Source, check_fits, check_shapes, text_config

SPECULATORS = {"dflash": "DFlashSpeculator", "dspark": "DSparkSpeculator"}
# Keys of DSpark's heads.
HEAD_KEYS = (
    "markov_rank",
    "markov_head_type",
    "enable_confidence_head",
    "confidence_head_with_markov",
)


def write_portable(source: Source, out: Path) -> None:
    write_weights(out, source.config, check(source))


def write_speculators(source: Source, out: Path) -> None:
    """Started as `vllm serve OUT`: the target is named inside."""
    tensors = check(source)
    write_weights(out, speculators_config(source), tensors)


def speculators_config(source: Source) -> dict[str, Any]:
    settings = block_values(source.config)
    shape = shape_in(settings)
    if shape.causal or any(shape.windows):
        raise UserError(
            "the speculators layout has blocks whose slots all see each other, and this draft's "
            f"do not; train it with {source.family}.causal=false, or export it --to vllm"
        )
    outer = ("architectures", "dflash_config", "dtype", "target_layer_ids", *HEAD_KEYS)
    layer = {key: value for key, value in source.config.items() if key not in outer}
    return {
        "architectures": [SPECULATORS[source.family]],
        "speculators_model_type": source.family,
        "speculators_version": SPECULATORS_VERSION,
        "dtype": source.config.get("dtype", "float32"),
        "draft_vocab_size": source.config["vocab_size"],
        "block_size": shape.block_size,
        "mask_token_id": shape.mask_token,
        # Layers are counted by their inputs.
        "aux_hidden_state_layer_ids": [layer + 1 for layer in settings["target_layer_ids"]],
        "sample_from_anchor": bool(shape.markov_rank),
        "sliding_window_non_causal": True,
        "tie_word_embeddings": False,
        **{key: source.config[key] for key in HEAD_KEYS if key in source.config},
        "transformer_layer_config": layer,
        "speculators_config": speculators_plan(source, source.family),
    }


def check(source: Source) -> dict[str, torch.Tensor]:
    """Refuses a draft that an engine would load wrongly or not at all; returns its weights."""
    config, target = source.config, text_config(source.target_config)
    check_fits(source, vocab_size=config.get("vocab_size"), hidden_size=config.get("hidden_size"))
    if scales_its_embeddings(source):
        raise UserError(
            f"{source.target_name!r} scales its token embeddings, which engines do not do for a "
            "draft that shares them"
        )
    from_anchor = bool(config.get("markov_rank"))
    check_block(block_values(config), source.draft, from_anchor=from_anchor)
    check_layers({**config, **(config.get("dflash_config") or {})}, target["num_hidden_layers"])
    tensors = read_weights(source.draft)
    expected = expected_shapes(config)
    check_shapes({name: tuple(tensor.shape) for name, tensor in tensors.items()}, expected)
    if unknown := sorted(tensors.keys() - expected.keys()):
        raise UserError(
            f"weight {unknown[0]!r} has no place in the {source.family} layout; remove it"
        )
    return tensors


def check_layers(values: dict[str, Any], num_layers: int) -> None:
    """Engines count the tapped layers by their outputs and hand them over in layer order."""
    layers = values["target_layer_ids"]
    if layers != sorted(set(layers)):
        raise UserError(
            f"the draft taps the outputs of layers {layers}; engines hand them over in order, so "
            "train with ascending taps"
        )
    if layers[0] < 0 or layers[-1] > num_layers - 2:
        raise UserError(
            f"the draft taps the outputs of layers {layers} of {num_layers}; engines can read 0 "
            f"to {num_layers - 2}"
        )


def expected_shapes(config: dict[str, Any]) -> dict[str, tuple[int, ...]]:
    hidden, inner, width = config["hidden_size"], config["intermediate_size"], config["head_dim"]
    queries, keys = config["num_attention_heads"] * width, config["num_key_value_heads"] * width
    taps = len(config["dflash_config"]["target_layer_ids"])
    shapes: dict[str, tuple[int, ...]] = {
        "fc.weight": (hidden, taps * config["target_hidden_size"]),
        "hidden_norm.weight": (hidden,),
        "norm.weight": (hidden,),
    }
    for layer in range(config["num_hidden_layers"]):
        shapes |= {
            f"layers.{layer}.{name}.weight": shape
            for name, shape in {
                "self_attn.q_proj": (queries, hidden),
                "self_attn.k_proj": (keys, hidden),
                "self_attn.v_proj": (keys, hidden),
                "self_attn.o_proj": (hidden, queries),
                "self_attn.q_norm": (width,),
                "self_attn.k_norm": (width,),
                "mlp.gate_proj": (inner, hidden),
                "mlp.up_proj": (inner, hidden),
                "mlp.down_proj": (hidden, inner),
                "input_layernorm": (hidden,),
                "post_attention_layernorm": (hidden,),
            }.items()
        }
    if rank := config.get("markov_rank"):
        shapes |= dict.fromkeys(
            ("markov_head.markov_w1.weight", "markov_head.markov_w2.weight"),
            (config["vocab_size"], rank),
        )
    if config.get("enable_confidence_head"):
        width = hidden + (config["markov_rank"] if config["confidence_head_with_markov"] else 0)
        shapes |= {"confidence_head.proj.weight": (1, width), "confidence_head.proj.bias": (1,)}
    return shapes
