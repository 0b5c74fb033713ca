"""The decoder layer of EAGLE-3 and the places around it where drafts differ in their norms."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from transformers import PreTrainedConfig
from transformers.models.llama.modeling_llama import LlamaRMSNorm

from draftsmith.drafters.heads.layer_kinds import kind_of
from draftsmith.drafters.target.attention import AttentionContext


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
        self.self_attn = kind.attention(config, 0)
        # The attention reads embedding and state side by side.
        for name in kind.inputs:
            # None, or no attribute at all in older transformers, where there is no such projection.
            plain = getattr(self.self_attn, name, None)
            if plain is not None:
                wide = nn.Linear(2 * size, plain.out_features, bias=plain.bias is not None)
                self.self_attn.set_submodule(name, wide)
        self.mlp = kind.mlp(config)
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
