"""vLLM's reading of MTP modules under names of their own in the target's folder: Qwen3-Next,
Qwen3.5 and Ernie-4.5."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from draftsmith.drafters.weights import read_weights
from draftsmith.errors import UserError
from draftsmith.train.export.source import text_config
from tests.engine_readers.understood import (
    BLOCK_NORMS,
    LAYER_NORMS,
    Shapes,
    Understood,
    decoder_layer,
    filled,
    gated,
)
from tests.engine_readers.vllm_taps import NAME

ERNIE = "model.mtp_"


def read_qwen(folder: Path, config: dict[str, Any]) -> Understood:
    values = text_config(config)
    is_next = values["model_type"] == "qwen3_next"
    key = "num_nextn_predict_layers" if is_next else "mtp_num_hidden_layers"
    # Qwen3-Next's class counts one module where its config counts none.
    if values.get(key, 1 if is_next else None) != 1:
        raise UserError(f"{NAME} finds no MTP module of one layer, by {key}; the layout is wrong")
    tensors = filled_behind(folder, "mtp.", qwen_module(values))
    return Understood(config, tensors, target=folder)


def qwen_module(values: dict[str, Any]) -> Shapes:
    """Parameters behind `mtp.`."""
    hidden = values["hidden_size"]
    layer = decoder_layer("", {"intermediate_size": 0, **values}, norms=BLOCK_NORMS)
    if values.get("attn_output_gate", True):
        rows, columns = layer["self_attn.q_proj.weight"]
        layer["self_attn.q_proj.weight"] = (2 * rows, columns)
    if has_experts(values):
        layer = {name: shape for name, shape in layer.items() if not name.startswith("mlp.")}
        layer |= experts(values)
    shapes: Shapes = {f"layers.0.{name}": shape for name, shape in layer.items()}
    shapes["fc.weight"] = (hidden, 2 * hidden)
    for name in ("norm", "pre_fc_norm_embedding", "pre_fc_norm_hidden"):
        shapes[f"{name}.weight"] = (hidden,)
    return shapes


def has_experts(values: dict[str, Any]) -> bool:
    """Experts in layer 0, which the module's is for vLLM."""
    step = values.get("decoder_sparse_step", 1)
    return values.get("num_experts", 0) > 0 and (
        "3_5" in values["model_type"] or (step == 1 and 0 not in values.get("mlp_only_layers", ()))
    )


def experts(values: dict[str, Any]) -> Shapes:
    hidden, count = values["hidden_size"], values["num_experts"]
    widths = {f"experts.{number}": values["moe_intermediate_size"] for number in range(count)}
    widths["shared_expert"] = values["shared_expert_intermediate_size"]
    shapes: Shapes = {"mlp.gate.weight": (count, hidden)}
    shapes["mlp.shared_expert_gate.weight"] = (1, hidden)
    for name, width in widths.items():
        shapes |= gated(f"mlp.{name}", width, hidden)
    return shapes


def read_ernie(folder: Path, config: dict[str, Any]) -> Understood:
    """Its block is Llama's, which rotates halves where the target's layers rotate pairs."""
    if config.get("num_nextn_predict_layers") != 1:
        raise UserError(f"{NAME} finds no MTP module of one layer; the layout is wrong")
    hidden = config["hidden_size"]
    shapes = decoder_layer("block.0.", config, norms=LAYER_NORMS)
    shapes |= {"emb_norm.0.weight": (hidden,), "hidden_norm.0.weight": (hidden,)}
    shapes["linear_proj.0.weight"] = (hidden, 2 * hidden)
    tensors = filled_behind(folder, ERNIE, shapes)
    width = config.get("head_dim") or hidden // config["num_attention_heads"]
    for kind in ("q", "k"):
        name = f"{ERNIE}block.0.self_attn.{kind}_proj.weight"
        heads = tensors[name].unflatten(0, (-1, 2, width // 2))
        tensors[name] = heads.transpose(1, 2).flatten(0, 2).contiguous()
    return Understood(config, tensors, target=folder)


def filled_behind(
    folder: Path, prefix: str, shapes: Shapes, *, engine: str = NAME
) -> dict[str, torch.Tensor]:
    return filled(
        engine, read_weights(folder), {prefix + name: shape for name, shape in shapes.items()},
        named=lambda name: name if name.startswith(prefix) else None,
    )  # fmt: skip


BESIDE: dict[str, Callable[[Path, dict[str, Any]], Understood]] = {
    **dict.fromkeys(
        ("qwen3_next", "qwen3_5", "qwen3_5_text", "qwen3_5_moe", "qwen3_5_moe_text"), read_qwen
    ),
    "ernie4_5_moe": read_ernie,
}
