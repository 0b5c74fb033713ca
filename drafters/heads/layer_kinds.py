"""Kinds of decoder layers that EAGLE-3 drafts are published with."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from typing import Any, NamedTuple

from torch import nn
from transformers import DeepseekV3Config, LlamaConfig, PreTrainedConfig, Qwen3Config
from transformers.models.deepseek_v3.modeling_deepseek_v3 import (
    DeepseekV3Attention,
    DeepseekV3DecoderLayer,
    DeepseekV3MLP,
    DeepseekV3RotaryEmbedding,
)
from transformers.models.llama.modeling_llama import (
    LlamaAttention,
    LlamaDecoderLayer,
    LlamaMLP,
    LlamaRotaryEmbedding,
)
from transformers.models.qwen3.modeling_qwen3 import (
    Qwen3Attention,
    Qwen3DecoderLayer,
    Qwen3MLP,
    Qwen3RotaryEmbedding,
)

from draftsmith.drafters.draft_shape import config_dict, layer_config
from draftsmith.kernels.attention.pool import LayerShape


class LayerKind(NamedTuple):
    architecture: str  # engines' name for a draft of it
    config: type[PreTrainedConfig]
    attention: Callable[[PreTrainedConfig, int], nn.Module]
    inputs: tuple[str, ...]  # projections that read the layer's input
    mlp: Callable[[PreTrainedConfig], nn.Module]
    layer: Callable[[PreTrainedConfig, int], nn.Module]
    rotary: Callable[[PreTrainedConfig], nn.Module]
    mark: str  # a tensor of its attention that no other kind has
    keys: tuple[str, ...] = ()  # of its config besides Llama's


LLAMA = LayerKind(
    "LlamaForCausalLMEagle3",
    LlamaConfig,
    LlamaAttention,
    ("q_proj", "k_proj", "v_proj"),
    LlamaMLP,
    LlamaDecoderLayer,
    LlamaRotaryEmbedding,
    "",
)
QWEN3 = LayerKind(
    "Eagle3Qwen3ForCausalLM",
    Qwen3Config,
    Qwen3Attention,
    ("q_proj", "k_proj", "v_proj"),
    Qwen3MLP,
    Qwen3DecoderLayer,
    Qwen3RotaryEmbedding,
    "self_attn.q_norm.weight",
)
LATENT = LayerKind(
    "Eagle3DeepseekV2ForCausalLM",
    DeepseekV3Config,
    DeepseekV3Attention,
    ("q_proj", "q_a_proj", "kv_a_proj_with_mqa"),
    DeepseekV3MLP,
    DeepseekV3DecoderLayer,
    DeepseekV3RotaryEmbedding,
    "self_attn.kv_a_proj_with_mqa.weight",
    (
        "q_lora_rank",
        "kv_lora_rank",
        "qk_rope_head_dim",
        "qk_nope_head_dim",
        "v_head_dim",
        "rope_interleave",
    ),
)
KINDS = (QWEN3, LATENT, LLAMA)


def kind_of(config: PreTrainedConfig) -> LayerKind:
    return next(kind for kind in KINDS if type(config) is kind.config)


def kind_in(names: Collection[str]) -> LayerKind:
    """The kind of the first layer with these tensors."""
    marked = (kind for kind in KINDS if kind.mark and f"midlayer.{kind.mark}" in names)
    return next(marked, LLAMA)


def config_of(kind: LayerKind, values: Mapping[str, Any]) -> PreTrainedConfig:
    """Config of the draft's layers from `config.json` values."""
    more = {key: values[key] for key in kind.keys if key in values}
    if kind is LATENT:
        # No layer has experts, and its heads' width is that of their rotated part.
        more |= {"first_k_dense_replace": values["num_hidden_layers"]}
        values = {key: value for key, value in values.items() if key != "head_dim"}
    return layer_config(kind.config, dict(values), more)


def config_values(config: PreTrainedConfig) -> dict[str, Any]:
    """The inverse, under engines' names."""
    kind = kind_of(config)
    more = {key: getattr(config, key) for key in kind.keys}
    return {"model_type": config.model_type, **config_dict(config), **more}


def cache_shape(config: PreTrainedConfig) -> LayerShape:
    """Keys and values of a layer."""
    if kind_of(config) is LATENT:
        key_dim = config.qk_nope_head_dim + config.qk_rope_head_dim
        return LayerShape(config.num_attention_heads, key_dim, config.v_head_dim)
    return LayerShape(config.num_key_value_heads, config.head_dim, config.head_dim)
