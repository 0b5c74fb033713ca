"""vLLM's reading of draft folders of other families than EAGLE-3."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

from draftsmith.drafters.weights import read_config, read_weights
from draftsmith.errors import UserError
from draftsmith.train.export.layouts.source import text_config
from tests.engine_readers.understood import (
    BLOCK_NORMS,
    Parameters,
    Shapes,
    Understood,
    decoder_layer,
    renamed,
)
from tests.engine_readers.vllm_taps import NAME, tapped_layers


def read_eagle1(folder: Path, target_config: dict[str, Any]) -> Understood:
    config = read_config(folder)
    if config["architectures"] != ["EagleLlamaForCausalLM"]:
        raise UserError(
            f"vLLM loads {config['architectures']} as another model; the layout is wrong"
        )
    hidden = config["hidden_size"]
    # The first layer has no norm before its attention, the projection no bias, the end no norm.
    shapes = decoder_layer("model.layers.0.", config, norms=("post_attention_layernorm",))
    shapes["model.fc.weight"] = (hidden, 2 * hidden)
    shared: Shapes = {
        "model.embed_tokens.weight": (config["vocab_size"], hidden),
        "lm_head.weight": (config["vocab_size"], hidden),
    }
    parameters = Parameters(NAME, shapes, optional=shared, strict=True)
    for name, tensor in read_weights(folder).items():
        parameters.fill(name if "lm_head" in name else "model." + name, tensor)
    return Understood(config, renamed(parameters.loaded(), "model.", ""))


def read_dflash(folder: Path, target_config: dict[str, Any]) -> Understood:
    config = read_config(folder)
    if config["architectures"] != ["DFlashDraftModel"] or config["dflash_config"].get(
        "sample_from_anchor"
    ):
        raise UserError(
            f"vLLM does not load {config['architectures']} as a DFlash block that keeps its "
            "anchor; the layout is wrong"
        )
    return block_from(config, read_weights(folder), target_config)


def read_dspark(folder: Path, target_config: dict[str, Any]) -> Understood:
    config = read_config(folder)
    if config["architectures"] != ["Qwen3DSparkModel"] or not config.get(
        "sample_from_anchor", True
    ):
        raise UserError(
            f"vLLM does not load {config['architectures']} as a dense DSpark block; the layout is "
            "wrong"
        )
    if config.get("markov_head_type", "vanilla") != "vanilla":
        raise UserError(
            f"vLLM has no markov_head_type {config['markov_head_type']!r}; train a vanilla one"
        )
    return block_from(config, read_weights(folder), target_config)


def block_from(
    config: dict[str, Any], tensors: dict[str, torch.Tensor], target_config: dict[str, Any]
) -> Understood:
    raw = tapped_layers(config, text_config(target_config)["num_hidden_layers"])
    hidden, width = config["hidden_size"], config.get("target_hidden_size") or config["hidden_size"]
    shapes = {
        "model.fc.weight": (hidden, len(raw) * width),
        "model.hidden_norm.weight": (hidden,),
        "model.norm.weight": (hidden,),
    }
    for layer in range(config["num_hidden_layers"]):
        shapes |= decoder_layer(f"model.layers.{layer}.", config, norms=BLOCK_NORMS)
    optional: Shapes = {}
    if rank := config.get("markov_rank"):
        shapes |= dict.fromkeys(
            ("model.markov_head.markov_w1.weight", "model.markov_head.markov_w2.weight"),
            (config["vocab_size"], rank),
        )
        if config.get("enable_confidence_head"):
            read = hidden + (rank if config.get("confidence_head_with_markov") else 0)
            optional |= {
                "model.confidence_head.proj.weight": (1, read),
                "model.confidence_head.proj.bias": (1,),
            }
    parameters = Parameters(NAME, shapes, optional=optional, strict=True)
    for name, tensor in tensors.items():
        parameters.fill("model." + name, tensor)
    return own_block(config, raw, renamed(parameters.loaded(), "model.", ""))


def own_block(
    config: dict[str, Any], raw: list[int], tensors: dict[str, torch.Tensor]
) -> Understood:
    outputs = [layer - 1 for layer in raw]
    config = {
        **config,
        "dflash_config": {**(config.get("dflash_config") or {}), "target_layer_ids": outputs},
    }
    return Understood(
        config | ({"target_layer_ids": outputs} if "target_layer_ids" in config else {}), tensors
    )


def read_medusa(folder: Path, target_config: dict[str, Any]) -> Understood:
    """vLLM up to 0.32. Unknown names are passed over, and one table serves all heads with
    `original_lm_head`."""
    config, hidden = read_config(folder), read_config(folder)["hidden_size"]
    if config["model_type"] != "medusa":
        raise UserError(
            f"vLLM takes model_type {config['model_type']!r} for no Medusa; the layout is wrong"
        )
    shapes: Shapes = {}
    for head in range(config["num_heads"]):
        for layer in range(config["num_hidden_layers"]):
            shapes[f"blocks.{head}.layers.{layer}.weight"] = (hidden, hidden)
            if config.get("medusa_fc_bias"):
                shapes[f"blocks.{head}.layers.{layer}.bias"] = (hidden,)
    tables = (
        ["lm_head"]
        if config.get("original_lm_head")
        else [f"lm_heads.{head}" for head in range(config["num_heads"])]
    )
    shapes |= {f"{table}.weight": (config["vocab_size"], hidden) for table in tables}
    parameters = Parameters(NAME, shapes, strict=False)
    for name, tensor in read_weights(folder).items():
        parameters.fill(name, tensor)
    return Understood(config, parameters.loaded())
