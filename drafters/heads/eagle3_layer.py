"""The decoder layer of EAGLE-3, the kinds that drafts are published with, and the places around it
where they differ in their norms."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass
from types import ModuleType
from typing import Any, NamedTuple

import torch
from torch import nn
from transformers import DeepseekV3Config, LlamaConfig, PreTrainedConfig, Qwen3Config
from transformers.models.deepseek_v3 import modeling_deepseek_v3
from transformers.models.llama import modeling_llama
from transformers.models.llama.modeling_llama import LlamaRMSNorm
from transformers.models.qwen3 import modeling_qwen3

from draftsmith.drafters.draft_shape import config_dict, layer_config
from draftsmith.drafters.target.attention import AttentionContext
from draftsmith.kernels.attention.pool import LayerShape


@dataclass(frozen=True, kw_only=True)
class Norms:
    """Norms that a draft has, under the names of its `config.json`."""

    norm_before_residual: bool = False  # the residual stream starts from the normed state
    norm_before_fc: bool = False  # one norm over all taps
    fc_norm: bool = False  # a norm for each tap (EAGLE-3.1)
    # the state fed back is the normed one, which the head reads (EAGLE-3.1)
    norm_output: bool = False

    @classmethod
    def of(cls, values: Mapping[str, Any]) -> Norms:
        nested = values.get("eagle_config") or {}
        return cls(
            norm_before_residual=bool(values.get("norm_before_residual")),
            norm_before_fc=bool(nested.get("norm_before_fc", values.get("norm_before_fc"))),
            fc_norm=bool(values.get("fc_norm")),
            norm_output=bool(values.get("norm_output")),
        )


class Eagle3Layer(nn.Module):
    def __init__(self, config: PreTrainedConfig, *, norm_before_residual: bool = False):
        super().__init__()
        size, kind = config.hidden_size, kind_of(config)
        self.self_attn = kind.part("Attention")(config, 0)
        # The attention reads embedding and state side by side.
        for name in kind.inputs:
            # None, or no attribute at all in older transformers, where there is no such projection.
            plain = getattr(self.self_attn, name, None)
            if plain is not None:
                wide = nn.Linear(2 * size, plain.out_features, bias=plain.bias is not None)
                self.self_attn.set_submodule(name, wide)
        self.mlp = kind.part("MLP")(config)
        self.input_layernorm = LlamaRMSNorm(size, eps=config.rms_norm_eps)
        self.hidden_norm = LlamaRMSNorm(size, eps=config.rms_norm_eps)
        self.post_attention_layernorm = LlamaRMSNorm(size, eps=config.rms_norm_eps)
        self.norm_before_residual = norm_before_residual

    def forward(
        self,
        embeds: torch.Tensor,
        hidden: torch.Tensor,
        rotary: tuple[torch.Tensor, torch.Tensor],
        context: AttentionContext,
    ) -> torch.Tensor:
        normed = self.hidden_norm(hidden)
        if self.norm_before_residual:
            hidden = normed
        mixed = torch.cat([self.input_layernorm(embeds), normed], dim=-1)
        attended, _ = self.self_attn(
            mixed, position_embeddings=rotary, attention_mask=None, attention_context=context
        )
        hidden = hidden + attended
        return hidden + self.mlp(self.post_attention_layernorm(hidden))


class TapNorms(nn.ModuleList):
    """A norm for each tap of [..., n * H_t]."""

    def __init__(self, num_taps: int, size: int, eps: float):
        super().__init__(LlamaRMSNorm(size, eps=eps) for _ in range(num_taps))
        self.size = size

    def forward(self, taps: torch.Tensor) -> torch.Tensor:
        # Not chunks or slices: a capture of this leaves the width open and could not say how many
        # there are.
        apart = taps.unflatten(-1, (len(self), self.size))
        return torch.cat([norm(apart[..., index, :]) for index, norm in enumerate(self)], dim=-1)


class LayerKind(NamedTuple):
    architecture: str  # engines' name for a draft of it
    config: type[PreTrainedConfig]
    module: ModuleType  # of transformers, with its classes
    name: str  # how theirs begin
    inputs: tuple[str, ...]  # projections that read the layer's input
    mark: str  # a tensor of its attention that no other kind has
    keys: tuple[str, ...] = ()  # of its config besides Llama's

    def part(self, ending: str) -> Any:
        """Its class of that name: Attention, MLP, DecoderLayer, RotaryEmbedding."""
        return getattr(self.module, self.name + ending)


QKV = ("q_proj", "k_proj", "v_proj")
LLAMA = LayerKind("LlamaForCausalLMEagle3", LlamaConfig, modeling_llama, "Llama", QKV, "")
QWEN3 = LayerKind(
    "Eagle3Qwen3ForCausalLM", Qwen3Config, modeling_qwen3, "Qwen3", QKV, "self_attn.q_norm.weight"
)
LATENT = LayerKind(
    "Eagle3DeepseekV2ForCausalLM",
    DeepseekV3Config,
    modeling_deepseek_v3,
    "DeepseekV3",
    ("q_proj", "q_a_proj", "kv_a_proj_with_mqa"),
    "self_attn.kv_a_proj_with_mqa.weight",
    (
        "q_lora_rank", "kv_lora_rank", "qk_rope_head_dim", "qk_nope_head_dim", "v_head_dim",
        "rope_interleave",
    ),
)  # fmt: skip
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
