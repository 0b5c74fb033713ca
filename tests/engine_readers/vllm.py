"""vLLM's reading of draft folders of other families than EAGLE-3."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

from draftsmith.drafters.weights import read_config, read_weights
from draftsmith.errors import UserError
from draftsmith.train.export.source import text_config
from tests.engine_readers import understood
from tests.engine_readers.understood import Shapes, Understood, block_shapes, filled
from tests.engine_readers.vllm_taps import NAME, tapped_layers


def read_eagle1(folder: Path, target_config: dict[str, Any]) -> Understood:
    return understood.read_eagle1(NAME, folder, "EagleLlamaForCausalLM", strict=True)


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
    width = config.get("target_hidden_size") or config["hidden_size"]
    # A guess of its own acceptance is DSpark's alone, and need not be there.
    shapes, guess = block_shapes(config, len(raw), width)
    optional = guess if config.get("markov_rank") else {}
    return own_block(config, raw, filled(NAME, tensors, shapes, optional=optional))


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
    return Understood(config, filled(NAME, read_weights(folder), shapes, strict=False))
