"""vLLM's reading of DFlash and DSpark folders."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

from draftsmith.drafters.weights import read_config, read_weights
from draftsmith.train.export.source import text_config
from tests.engine_readers.understood import Understood, block_shapes, filled, in_layer_order

NAME = "vLLM"


def read_dflash(folder: Path, target_config: dict[str, Any]) -> Understood:
    config = read_config(folder)
    assert config["architectures"] == ["DFlashDraftModel"] and (
        not config["dflash_config"].get("sample_from_anchor")
    )
    return block_from(config, read_weights(folder), target_config)


def read_dspark(folder: Path, target_config: dict[str, Any]) -> Understood:
    config = read_config(folder)
    assert config["architectures"] == ["Qwen3DSparkModel"] and config.get(
        "sample_from_anchor", True
    )
    assert config.get("markov_head_type", "vanilla") == "vanilla"
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


def tapped_layers(config: dict[str, Any], num_layers: int) -> list[int]:
    """Raw ids, by the first key that its runners know."""
    raw = config.get("eagle_aux_hidden_state_layer_ids")
    if not raw:
        block = config.get("dflash_config") or {}
        raw = [layer + 1 for layer in block.get("target_layer_ids") or config["target_layer_ids"]]
    return in_layer_order(raw, num_layers)


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
