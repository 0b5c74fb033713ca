"""EAGLE-3 (arXiv 2503.01840): one decoder layer over three taps of the target, drafting from its
own states.

Module and tensor names are the portable checkpoint's, which vLLM and SGLang load as they are.

    state at t   = fc(cat(taps of t))                              or, drafting further, the layer's
    own output at t - 1
    layer input  = cat(input_layernorm(embed(x_{t+1})), hidden_norm(state))
    next state   = state + attention + mlp;   logits of x_{t+2} = lm_head(norm(next state))

`Norms` names the variants of this that are trained, and served if made elsewhere. Further layers
are plain decoder layers.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
from torch import nn
from transformers import PreTrainedConfig
from transformers.models.llama.modeling_llama import LlamaRMSNorm

from draftsmith.drafters.draft_shape import (
    Windows,
    check_fits,
    llama_config,
    new_windows,
    shape_of,
    windows_config,
    windows_in,
)
from draftsmith.drafters.heads.eagle3_layer import (
    Eagle3Layer,
    Norms,
    TapNorms,
    cache_shape,
    config_of,
    config_values,
    kind_in,
    kind_of,
)
from draftsmith.drafters.heads.feature_head import FeatureHead, HeadStep
from draftsmith.drafters.init_from_target import (
    OwnTables,
    adopt_layer,
    average_taps,
    check_map,
    fitted_norm,
    frequent_tokens,
    shares_embeddings,
)
from draftsmith.drafters.layouts.folder import DraftFolder, flattened, renamed
from draftsmith.drafters.options import Eagle3Options, default_taps
from draftsmith.drafters.target.attention import AttentionContext
from draftsmith.drafters.target.taps import check_draft_taps
from draftsmith.drafters.target.target import Target
from draftsmith.drafters.weights import read_config, read_weights
from draftsmith.kernels.attention.pool import LayerShape
from draftsmith.kernels.products.fast_types import name_of

ARCHITECTURES = (
    "LlamaForCausalLMEagle3",
    "Eagle3LlamaForCausalLM",
    "Eagle3Speculator",
    "Eagle3DraftModel",
    "Eagle3MiniMaxM2ForCausalLM",
    "Eagle3Qwen2_5vlForCausalLM",
    "Eagle3Qwen3vlForCausalLM",
    "Eagle3Qwen3ForCausalLM",
    "Eagle3DeepseekV2ForCausalLM",
    "Eagle3DeepseekV3ForCausalLM",
)
# The name of the first layer that later trainers give it.
PREFIXES = {"layers.0.": "midlayer."}


class Eagle3(FeatureHead):
    family = "eagle3"

    def __init__(
        self,
        config: PreTrainedConfig,
        target: Target,
        taps: tuple[int, ...],
        draft_vocab_size: int,
        *,
        norms: Norms | None = None,
        windows: Windows = (),
        own_embeddings: bool = False,
    ):
        super().__init__()
        self.config, self.vocab_size = config, config.vocab_size
        self.taps = taps
        self.windows = windows
        self.norms = norms = norms or Norms()
        self._target = target
        self.fc = nn.Linear(len(taps) * target.hidden_size, config.hidden_size, bias=False)
        self.input_norm = (
            LlamaRMSNorm(self.fc.in_features, eps=config.rms_norm_eps)
            if norms.norm_before_fc
            else None
        )
        self.fc_norm = (
            TapNorms(len(taps), target.hidden_size, config.rms_norm_eps) if norms.fc_norm else None
        )
        self.midlayer = Eagle3Layer(config, norm_before_residual=norms.norm_before_residual)
        kind, later = kind_of(config), range(1, config.num_hidden_layers)
        self.layers = nn.ModuleDict(
            {str(index): kind.part("DecoderLayer")(config, index) for index in later}
        )
        self.norm = LlamaRMSNorm(config.hidden_size, eps=config.rms_norm_eps)
        subset = draft_vocab_size < config.vocab_size
        OwnTables(draft_vocab_size, subset, own_embeddings).add_to(self, config)
        self.lm_head.requires_grad_(True)
        self._rotary = (kind.part("RotaryEmbedding")(config),)
        self.register_buffer(
            "t2d", torch.ones(config.vocab_size, dtype=torch.bool) if subset else None
        )
        self.to(target.device)

    @classmethod
    def matches(cls, draft: DraftFolder, target: Target | None = None) -> bool:
        return draft.architecture in ARCHITECTURES

    @classmethod
    def new(
        cls, options: Eagle3Options, target: Target, token_counts: torch.Tensor | None
    ) -> Eagle3:
        config = llama_config(shape_of(target, options))
        taps = options.taps or default_taps(target.num_layers)
        check_draft_taps(taps, target.num_layers)
        vocab_size = min(options.draft_vocab_size or target.vocab_size, target.vocab_size)
        norms = Norms(
            norm_before_residual=options.norm_before_residual,
            fc_norm=options.fc_norm,
            norm_output=options.norm_output,
        )
        drafter = cls(
            config,
            target,
            taps,
            vocab_size,
            norms=norms,
            windows=new_windows(options.window, config.num_hidden_layers),
            own_embeddings=not shares_embeddings(target),
        )
        drafter.begin_embeddings()
        if drafter.d2t is not None:
            drafter.set_vocab(frequent_tokens(token_counts, vocab_size, target.eos_token_ids))
        start_from_target(drafter, target)
        drafter.lm_head.requires_grad_(options.train_head)
        return drafter

    def cache_shapes(self) -> list[LayerShape]:
        return [cache_shape(self.config)] * self.config.num_hidden_layers

    def set_vocab(self, ids: torch.Tensor) -> None:
        """`ids` [Vd], ascending target ids."""
        self.d2t.copy_(ids - torch.arange(len(ids), device=ids.device))
        self.t2d.fill_(False)[ids] = True

    def fuse(self, taps: torch.Tensor) -> torch.Tensor:
        taps = super().fuse(taps)
        if self.input_norm is not None:
            taps = self.input_norm(taps)
        if self.fc_norm is not None:
            taps = self.fc_norm(taps)
        return self.fc(taps)

    def step(
        self,
        embeds: torch.Tensor,
        hidden: torch.Tensor,
        positions: torch.Tensor,
        context: AttentionContext,
    ) -> HeadStep:
        rotary, context = self._rotary[0](hidden, positions), self.windowed(context)
        hidden = self.midlayer(embeds, hidden, rotary, context)
        for layer in self.layers.values():
            hidden = layer(hidden, position_embeddings=rotary, attention_context=context)
        normed = self.norm(hidden)
        return HeadStep(next_hidden=normed if self.norms.norm_output else hidden, head_input=normed)

    def portable_config(self) -> dict[str, Any]:
        """`config.json` that vLLM and SGLang read alike. Each takes the taps from its own key and
        counts them its own way."""
        return {
            "architectures": [kind_of(self.config).architecture],
            **config_values(self.config),
            "dtype": name_of(self.dtype),
            "tie_word_embeddings": False,
            "draft_vocab_size": self.lm_head.out_features,
            "target_hidden_size": self._target.hidden_size,
            "num_aux_hidden_states": len(self.taps),
            **asdict(self.norms),
            **windows_config(self.windows),
            "eagle_aux_hidden_state_layer_ids": list(self.taps),
            "eagle_config": {
                "use_aux_hidden_state": True,
                "eagle_aux_hidden_state_layer_ids": [tap - 1 for tap in self.taps],
            },
        }

    @classmethod
    def load(cls, folder: Path, target: Target) -> Eagle3:
        """Our own folder or one made elsewhere, in the speculators layout too: any layer prefix,
        layer-id key and norms."""
        values = flattened(read_config(folder))
        check_portable(values, target, folder)
        tensors = {renamed(name, PREFIXES): tensor for name, tensor in read_weights(folder).items()}
        # The norm that only a first layer uses.
        tensors = {name: tensor for name, tensor in tensors.items() if not unused_norm(name)}
        vocab_size = values.get("draft_vocab_size") or target.vocab_size
        drafter = cls(
            config_of(kind_in(tensors.keys()), values),
            target,
            taps_of(values, target),
            vocab_size,
            norms=Norms.of(values),
            windows=windows_in(values),
            own_embeddings="embed_tokens.weight" in tensors
            or values["hidden_size"] != target.hidden_size,
        )
        if drafter.d2t is None:
            # Some trainers write the map of a full vocabulary too.
            tensors = {key: tensor for key, tensor in tensors.items() if key not in ("d2t", "t2d")}
        elif "d2t" in tensors:
            check_map(tensors["d2t"], vocab_size, target.vocab_size, folder)
            ids = torch.arange(vocab_size) + tensors["d2t"]
            tensors["t2d"] = torch.zeros(target.vocab_size, dtype=torch.bool).index_fill(
                0, ids, True
            )
        return drafter.filled(tensors, folder)


@torch.no_grad()
def start_from_target(drafter: Eagle3, target: Target) -> None:
    """Head, last norm and layer are the target's, and fc averages the taps: the draft starts as the
    target's last layer over an early state, in the space of the target's head. After 60
    steps on the quickstart's target this gave tau 1.44, with a layer of random weights 1.33, with a
    random head too 1.21."""
    rows = target.output_weight
    ids = drafter.vocab_map
    drafter.lm_head.weight.copy_(rows if ids is None else rows[ids])
    drafter.norm.weight.copy_(fitted_norm(target))
    layer = drafter.midlayer
    adopt_layer(
        target.layers[-1], layer.self_attn, layer.mlp,
        attention_norm=layer.hidden_norm, mlp_norm=layer.post_attention_layernorm,
    )  # fmt: skip
    for later in drafter.layers.values():
        # Further layers begin by adding nothing.
        later.self_attn.o_proj.weight.zero_()
        later.mlp.down_proj.weight.zero_()
    average_taps(drafter.fc)


def unused_norm(name: str) -> bool:
    return name.startswith("layers.") and name.endswith(".hidden_norm.weight")


def check_portable(values: Mapping[str, Any], target: Target, folder: Path) -> None:
    expected = {
        "hidden_act": "silu",
        "vocab_size": target.vocab_size,
        "target_hidden_size": target.hidden_size,
    }
    # A draft as wide as its target may leave the target's width out.
    width = values.get("target_hidden_size") or values.get("hidden_size")
    check_fits({**values, "target_hidden_size": width}, expected, target, folder)


def taps_of(values: Mapping[str, Any], target: Target) -> tuple[int, ...]:
    """Raw ids: top-level ids are raw, ids under `eagle_config` count layer outputs and are one
    less."""
    if (raw := values.get("eagle_aux_hidden_state_layer_ids")) is not None:
        return tuple(raw)
    nested = (values.get("eagle_config") or {}).get("eagle_aux_hidden_state_layer_ids")
    if nested is not None:
        return tuple(layer + 1 for layer in nested)
    return default_taps(target.num_layers)
