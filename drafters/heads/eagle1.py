"""EAGLE-1 and EAGLE-2 (arXiv 2401.15077, 2406.16858): one decoder layer over the target's final
state, read by its head.

state at t   = the target's final state at t (what its head multiplies), or the layer's own output
at t - 1 next state   = decoder layer(fc(cat(embed(x_{t+1}), state))), without a norm before its
attention and after it logits of x_{t+2} = target's head(next state)

A draft with `layernorms` (a variant of the `speculators` library) norms the embedding, the input of
its attention and, for the head alone, its state.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import nn
from transformers import LlamaConfig
from transformers.models.llama.modeling_llama import (
    LlamaDecoderLayer,
    LlamaRMSNorm,
    LlamaRotaryEmbedding,
)

from draftsmith.drafters.draft_shape import (
    Windows,
    check_fits,
    config_dict,
    llama_config,
    new_windows,
    shape_of,
    windows_config,
    windows_in,
)
from draftsmith.drafters.heads.feature_head import FeatureHead, HeadStep
from draftsmith.drafters.init_from_target import OwnTables, shares_embeddings
from draftsmith.drafters.layouts.folder import DraftFolder, flattened, is_causal_lm, renamed
from draftsmith.drafters.options import Eagle1Options
from draftsmith.drafters.target.attention import AttentionContext
from draftsmith.drafters.target.taps import FINAL
from draftsmith.drafters.target.target import Target
from draftsmith.drafters.weights import read_config, read_weights
from draftsmith.kernels.products.fast_types import name_of

# vLLM's name for the layout without a bias, then SGLang's, which always has one.
ARCHITECTURES = ("EagleLlamaForCausalLM", "LlamaForCausalLMEagle")
# The speculators layout's names, which its HASS drafts have too, and those of the norms before the
# library has converted a draft.
PREFIXES = {
    "fusion_fc.": "fc.",
    "transformer.": "layers.0.",
    "embed_layernorm.": "embedding_layernorm.",
    "hidden_layernorm.": "layers.0.input_layernorm.",
    "lm_head_layernorm.": "pre_lm_head_layernorm.",
}


class Eagle1(FeatureHead):
    family = "eagle1"
    taps = (FINAL,)
    vocab_map = None

    def __init__(
        self,
        config: LlamaConfig,
        target: Target,
        *,
        bias: bool = False,
        output_bias: bool = False,
        windows: Windows = (),
        own_embeddings: bool = False,
        layernorms: bool = False,
    ):
        """`bias`: of fc; `output_bias`: of the attention's output, where its inputs have one;
        `layernorms`: whether embedding, layer and head read normed states."""
        super().__init__()
        self.config, self.vocab_size = config, config.vocab_size
        self.windows = windows
        self._target = target
        self._rotary = (LlamaRotaryEmbedding(config),)
        self.fc = nn.Linear(2 * config.hidden_size, config.hidden_size, bias=bias)
        layer = LlamaDecoderLayer(config, layer_idx=0)
        self.embedding_layernorm: nn.Module = nn.Identity()
        self.pre_lm_head_layernorm: nn.Module = nn.Identity()
        if layernorms:
            self.embedding_layernorm, self.pre_lm_head_layernorm = (
                LlamaRMSNorm(config.hidden_size, eps=config.rms_norm_eps) for _ in range(2)
            )
        else:
            layer.input_layernorm = nn.Identity()
        if not output_bias:
            layer.self_attn.o_proj.bias = None
        self.layers = nn.ModuleList([layer])
        OwnTables(embeddings=own_embeddings).add_to(self, config)
        self.to(target.device)

    @classmethod
    def matches(cls, draft: DraftFolder, target: Target | None = None) -> bool:
        return draft.architecture in ARCHITECTURES or has_fused_input(draft)

    @classmethod
    def new(
        cls, options: Eagle1Options, target: Target, token_counts: torch.Tensor | None
    ) -> Eagle1:
        """The draft starts by repeating the state it is given."""
        drafter = cls(
            llama_config(shape_of(target, options)),
            target,
            windows=new_windows(options.window, 1),
            own_embeddings=not shares_embeddings(target),
        )
        drafter.begin_embeddings()
        size = drafter.config.hidden_size
        drafter.fc.weight.data[:, size:] += torch.eye(size, device=target.device)
        return drafter

    @property
    def has_layernorms(self) -> bool:
        return isinstance(self.pre_lm_head_layernorm, LlamaRMSNorm)

    def step(
        self,
        embeds: torch.Tensor,
        hidden: torch.Tensor,
        positions: torch.Tensor,
        context: AttentionContext,
    ) -> HeadStep:
        mixed = self.fc(torch.cat([self.embedding_layernorm(embeds), hidden], dim=-1))
        rotary, context = self._rotary[0](mixed, positions), self.windowed(context)
        state = self.layers[0](mixed, position_embeddings=rotary, attention_context=context)
        return HeadStep(next_hidden=state, head_input=self.pre_lm_head_layernorm(state))

    def portable_config(self) -> dict[str, Any]:
        has_bias = self.fc.bias is not None
        return {
            "architectures": [ARCHITECTURES[1] if has_bias else ARCHITECTURES[0]],
            "model_type": "llama",
            **config_dict(self.config),
            **windows_config(self.windows),
            "bias": has_bias,
            **({"layernorms": True} if self.has_layernorms else {}),
            "dtype": name_of(self.dtype),
            "tie_word_embeddings": False,
        }

    @classmethod
    def load(cls, folder: Path, target: Target) -> Eagle1:
        """Our own folder or one made elsewhere, with or without a bias, norms and embeddings. A
        copy of the target's head is let go."""
        values = flattened(read_config(folder))
        check_portable(values, target, folder)
        tensors = {renamed(name, PREFIXES): tensor for name, tensor in read_weights(folder).items()}
        tensors.pop("lm_head.weight", None)
        attention = "layers.0.self_attn."
        drafter = cls(
            llama_config(values | {"attention_bias": f"{attention}q_proj.bias" in tensors}),
            target,
            bias="fc.bias" in tensors,
            output_bias=f"{attention}o_proj.bias" in tensors,
            windows=windows_in(values),
            own_embeddings="embed_tokens.weight" in tensors,
            layernorms=bool(values.get("layernorms")) or "embedding_layernorm.weight" in tensors,
        )
        return drafter.filled(tensors, folder)


def has_fused_input(draft: DraftFolder) -> bool:
    """True for the layer and `fc` that its authors publish under the architecture of their target,
    `LlamaForCausalLM` for one."""
    return (
        is_causal_lm(draft.config)
        and draft.config.get("num_hidden_layers") == 1
        and {"fc.weight", "layers.0.mlp.down_proj.weight"} <= draft.names
    )


def check_portable(values: Mapping[str, Any], target: Target, folder: Path) -> None:
    expected = {
        "num_hidden_layers": 1,
        "hidden_act": "silu",
        "vocab_size": target.vocab_size,
        "hidden_size": target.hidden_size,
    }
    check_fits(values, expected, target, folder)
