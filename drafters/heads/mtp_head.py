"""Forward of an MTP module (DeepSeek-V3, arXiv 2412.19437, section 2.2), applied again and again to
its own output.

    input at t  = eh_proj(cat(enorm(embed(x_{t+1})), hnorm(state)))        state: the target's last
    one, or the module's own
    next state  = norm(decoder layer(input));   logits of x_{t+2} = target's head(next state)

The embedding at position 0 is zero, as in most of vLLM's modules.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import nn
from transformers import PreTrainedConfig

from draftsmith.drafters.heads.feature_head import FeatureHead, HeadStep
from draftsmith.drafters.init_from_target import OwnTables
from draftsmith.drafters.target.attention import AttentionContext
from draftsmith.drafters.target.target import Target


class MtpHead(FeatureHead):
    family = "mtp"
    vocab_map = None

    def __init__(
        self,
        config: PreTrainedConfig,
        target: Target,
        *,
        tap: int,
        norm: Callable[[], nn.Module],
        layer: Callable[[], nn.Module],
        rotary: nn.Module,
        feeds_normed: bool = True,
        masks_first: bool = True,
        last_norm: bool = True,
    ):
        """`config` is the layer's. `feeds_normed`: drafting on, the module reads its own state
        after its norm; `masks_first`: the embedding at position 0 is zero; `last_norm`: the head
        reads a normed state."""
        super().__init__()
        size = config.hidden_size
        self.config, self.vocab_size = config, config.vocab_size
        self.taps = (tap,)
        self.feeds_normed, self.masks_first = feeds_normed, masks_first
        self._target = target
        self._rotary = (rotary,)
        self.enorm = norm()
        self.hnorm = norm()
        self.eh_proj = nn.Linear(2 * size, size, bias=False)
        self.layer = layer()
        self.norm = norm() if last_norm else nn.Identity()
        OwnTables().add_to(self, config)

    @property
    def dtype(self) -> torch.dtype:
        return self.eh_proj.weight.dtype

    def step(
        self,
        embeds: torch.Tensor,
        hidden: torch.Tensor,
        positions: torch.Tensor,
        context: AttentionContext,
    ) -> HeadStep:
        if self.masks_first:
            embeds = embeds.masked_fill((positions == 0)[..., None], 0.0)
        mixed = self.eh_proj(torch.cat([self.enorm(embeds), self.hnorm(hidden)], dim=-1))
        rotary, context = self._rotary[0](mixed, positions), self.windowed(context)
        state = self.layer(mixed, position_embeddings=rotary, attention_context=context)
        normed = self.norm(state)
        return HeadStep(next_hidden=normed if self.feeds_normed else state, head_input=normed)
