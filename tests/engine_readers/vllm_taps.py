"""Layers that vLLM taps: its two runners look for them under different keys of `config.json`."""

from __future__ import annotations

from typing import Any

from tests.engine_readers.understood import in_layer_order

NAME = "vLLM"


def tapped_layers(config: dict[str, Any], num_layers: int) -> list[int]:
    """Raw ids. The newer runner falls back on the model's default layers where the older one
    believes `eagle_config`."""
    newer = in_layer_order(newer_runner(config) or default_layers(num_layers), num_layers)
    older = in_layer_order(older_runner(config) or default_layers(num_layers), num_layers)
    assert newer == older
    return newer


def newer_runner(config: dict[str, Any]) -> list[int] | None:
    if raw := config.get("eagle_aux_hidden_state_layer_ids"):
        return raw
    block = config.get("dflash_config") or {}
    for outputs in (
        block.get("target_layer_ids"),
        config.get("dspark_target_layer_ids"),
        config.get("target_layer_ids"),
    ):
        if outputs:
            return [layer + 1 for layer in outputs]
    return block.get("layer_ids") or (config.get("eagle_config") or {}).get("layer_ids")


def older_runner(config: dict[str, Any]) -> list[int] | None:
    if raw := config.get("eagle_aux_hidden_state_layer_ids"):
        return raw
    if (eagle := config.get("eagle_config")) is not None:
        return eagle.get("eagle_aux_hidden_state_layer_ids")
    outputs = (config.get("dflash_config") or {}).get("target_layer_ids") or []
    return [layer + 1 for layer in outputs] or None


def default_layers(num_layers: int) -> list[int]:
    return [2, num_layers // 2, num_layers - 3]
