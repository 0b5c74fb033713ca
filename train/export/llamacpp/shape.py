"""Metadata and tensor names that llama.cpp has in common for all decoders of Llama's build."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import torch
from transformers import PreTrainedConfig
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

from draftsmith.errors import UserError

# Modules of a decoder layer.
LAYER = {
    "input_layernorm": "attn_norm",
    "hidden_norm": "attn_norm_2",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "self_attn.q_norm": "attn_q_norm",
    "self_attn.k_norm": "attn_k_norm",
    "post_attention_layernorm": "ffn_norm",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
}
OUTSIDE = {"embed_tokens": "token_embd", "norm": "output_norm", "lm_head": "output"}
# Rotary embeddings whose factors are the same at every length and that scale nothing else.
FIXED_ROPE = ("default", "linear", "llama3")


def shape_values(config: PreTrainedConfig) -> dict[str, Any]:
    heads = config.num_attention_heads
    width = getattr(config, "head_dim", None) or config.hidden_size // heads
    return {
        "block_count": config.num_hidden_layers,
        "context_length": config.max_position_embeddings,
        "embedding_length": config.hidden_size,
        "feed_forward_length": config.intermediate_size,
        "vocab_size": config.vocab_size,
        "attention.head_count": heads,
        "attention.head_count_kv": config.num_key_value_heads,
        "attention.key_length": width,
        "attention.value_length": width,
        "attention.layer_norm_rms_epsilon": float(config.rms_norm_eps),
        "rope.dimension_count": width,
        "rope.freq_base": float(config.rope_parameters["rope_theta"]),
    }


def check_layers(config: PreTrainedConfig) -> None:
    """Raises `UserError` for what these decoders have and llama.cpp's architectures have not."""
    if config.hidden_act != "silu":
        raise UserError(
            f"the model has hidden_act={config.hidden_act!r}, where llama.cpp's decoder of this "
            "kind has 'silu'; convert the pair with llama.cpp's own convert_hf_to_gguf.py"
        )
    if "sliding_attention" in (getattr(config, "layer_types", None) or ()) or (
        config.model_type == "mistral" and config.sliding_window
    ):
        raise UserError(
            f"the model has layers with a window of {config.sliding_window} tokens, which "
            "draftsmith does not write to GGUF; convert it with llama.cpp's own "
            "convert_hf_to_gguf.py"
        )


def rope_factors(config: PreTrainedConfig) -> dict[str, torch.Tensor]:
    """`rope_freqs` [D / 2], by which llama.cpp divides the plain frequencies; none where they are
    plain."""
    kind = config.rope_parameters.get("rope_type", "default")
    if kind not in FIXED_ROPE or config.rope_parameters.get("partial_rotary_factor", 1) != 1:
        raise UserError(
            f"the model has rotary embeddings of type {kind!r}, which draftsmith does not write "
            f"to GGUF ({', '.join(FIXED_ROPE)} it does); convert the pair with llama.cpp's own "
            "convert_hf_to_gguf.py"
        )
    if kind == "default":
        return {}
    scaled, _ = ROPE_INIT_FUNCTIONS[kind](config, torch.device("cpu"))
    steps = torch.arange(len(scaled), dtype=torch.float32) / len(scaled)
    plain = config.rope_parameters["rope_theta"] ** -steps
    return {"rope_freqs.weight": plain / scaled}


def layer_name(name: str) -> str | None:
    """`layers.2.mlp.up_proj.weight` -> `blk.2.ffn_up.weight`; None for no part of a layer."""
    parts = name.split(".")
    if parts[0] != "layers" or len(parts) < 4:
        return None
    module, kind = ".".join(parts[2:-1]), parts[-1]
    return f"blk.{parts[1]}.{LAYER[module]}.{kind}" if module in LAYER else None


def outside_name(name: str, more: Mapping[str, str]) -> str | None:
    module, _, kind = name.rpartition(".")
    known = {**OUTSIDE, **more}
    return f"{known[module]}.{kind}" if module in known else None


def named(
    tensors: Mapping[str, torch.Tensor], more: Mapping[str, str] | None = None
) -> dict[str, torch.Tensor]:
    """Tensors of a decoder by llama.cpp's names; `more` modules stand outside of its layers."""
    found = {}
    for name, tensor in tensors.items():
        own = layer_name(name) or outside_name(name, more or {})
        if own is None:
            raise UserError(
                f"weight {name!r} has no place in llama.cpp's decoder of this kind; convert the "
                "pair with llama.cpp's own convert_hf_to_gguf.py"
            )
        found[own] = tensor
    return found


def interleaved(
    tensors: Mapping[str, torch.Tensor], values: Mapping[str, Any]
) -> dict[str, torch.Tensor]:
    """Rows of queries and keys in the order of llama.cpp's Llama: the two halves of a head, which
    transformers turns against each other, one by one."""
    heads = {
        "attn_q": values["attention.head_count"],
        "attn_k": values["attention.head_count_kv"],
    }
    return {
        name: interleave(tensor, heads[part]) if (part := part_of(name)) in heads else tensor
        for name, tensor in tensors.items()
    }


def part_of(name: str) -> str:
    return name.split(".")[-2] if name.startswith("blk.") else ""


def interleave(weight: torch.Tensor, heads: int) -> torch.Tensor:
    rows = weight.shape[0]
    halves = weight.reshape(heads, 2, rows // heads // 2, *weight.shape[1:])
    return halves.transpose(1, 2).reshape(weight.shape)


def absolute_ids(offsets: torch.Tensor) -> torch.Tensor:
    """d2t as llama.cpp reads it: the target's id of every draft token, int64 [Vd]."""
    return torch.arange(len(offsets)) + offsets


def without(tensors: Mapping[str, torch.Tensor], names: Iterable[str]) -> dict[str, torch.Tensor]:
    left_out = set(names)
    return {name: tensor for name, tensor in tensors.items() if name not in left_out}
