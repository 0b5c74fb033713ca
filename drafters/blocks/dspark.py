"""DSpark (arXiv 2607.05147): a DFlash block whose drafts see the token before them through a
low-rank table of transitions.

    logits of x_{n+1+i} = target's head(norm(state of slot i)) + W2 @ W1[x_{n+i}]

The first draft is read off the newest token's own slot. The correction is part of q: drafts are
drawn one after another. The confidence head guesses alpha of a draft from its slot's state and the
token before it, so from nothing that is not known before the draft is drawn: a round may end by it
(invariant 4). It is trained towards alpha, with the draft.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from transformers import Qwen3Config

from draftsmith.drafters.blocks.dflash import Dflash
from draftsmith.drafters.blocks.shape import BlockShape
from draftsmith.drafters.init_from_target import OwnTables
from draftsmith.drafters.options import DsparkOptions
from draftsmith.drafters.target.target import Target
from draftsmith.drafters.weights import ReadBytes, weight_bytes
from draftsmith.errors import UserError


class MarkovHead(nn.Module):
    """`draft_vocab_size`: rows of the head that the transitions are added to."""

    def __init__(self, vocab_size: int, draft_vocab_size: int, rank: int):
        super().__init__()
        self.markov_w1 = nn.Embedding(vocab_size, rank)
        self.markov_w2 = nn.Linear(rank, draft_vocab_size, bias=False)
        # Nothing is known of transitions at first: the draft starts as a block without them, and
        # learns both tables from there.
        nn.init.zeros_(self.markov_w2.weight)


class ConfidenceHead(nn.Module):
    """`width`: how much of what the head multiplies is read, the state alone or the transition's
    row beside it."""

    def __init__(self, width: int):
        super().__init__()
        self.proj = nn.Linear(width, 1)
        nn.init.zeros_(self.proj.weight)
        nn.init.zeros_(self.proj.bias)

    def forward(self, head_input: torch.Tensor) -> torch.Tensor:
        """[..., H + rank] -> logits of alpha [...]."""
        return self.proj(head_input[..., : self.proj.in_features].to(self.proj.weight.dtype))[
            ..., 0
        ]


class Dspark(Dflash):
    """The head's rows are the target's, with those of W2 beside them, so that one product gives the
    corrected logits."""

    family = "dspark"
    architecture = "Qwen3DSparkModel"
    other_architectures = ("DSparkDraftModel",)
    from_anchor = True

    def __init__(
        self,
        config: Qwen3Config,
        target: Target,
        taps: tuple[int, ...],
        shape: BlockShape,
        tables: OwnTables | None = None,
    ):
        super().__init__(config, target, taps, shape, tables)
        if shape.markov_rank < 1:
            raise UserError(f"a dspark draft has markov_rank={shape.markov_rank}; give at least 1")
        rows = target.vocab_size if self.lm_head is None else self.lm_head.out_features
        self.markov_head = MarkovHead(target.vocab_size, rows, shape.markov_rank)
        self.markov_head.to(target.device)
        width = config.hidden_size + (shape.markov_rank if shape.confidence == "markov" else 0)
        self.confidence_head = ConfidenceHead(width).to(target.device) if shape.confidence else None

    @classmethod
    def shape_from(  # type: ignore[override]
        cls, options: DsparkOptions, target: Target
    ) -> BlockShape:
        return (
            super()
            .shape_from(options, target)
            ._replace(markov_rank=options.markov_rank, confidence="markov")
        )

    def head_weight(self) -> torch.Tensor:
        return torch.cat([super().head_weight(), self.markov_head.markov_w2.weight], dim=1)

    def head_input(self, states: torch.Tensor, previous: torch.Tensor) -> torch.Tensor:
        return torch.cat([states, self.markov_head.markov_w1(previous).to(states.dtype)], dim=-1)

    def confidence(self, head_input: torch.Tensor) -> torch.Tensor | None:
        return None if self.confidence_head is None else self.confidence_head(head_input)

    def read_bytes(self) -> ReadBytes:
        """The block in one pass, but transitions wait for the token before."""
        transitions = weight_bytes([self.markov_head])
        return ReadBytes(proposal=super().read_bytes().proposal - transitions, token=transitions)

    def portable_config(self) -> dict[str, Any]:
        config = super().portable_config()
        # Read at the top level for this architecture.
        return config | {
            "target_layer_ids": config["dflash_config"]["target_layer_ids"],
            "mask_token_id": self.shape.mask_token,
            "sample_from_anchor": True,
            "markov_rank": self.shape.markov_rank,
            "markov_head_type": "vanilla",
            "enable_confidence_head": self.confidence_head is not None,
            "confidence_head_with_markov": self.shape.confidence == "markov",
        }
