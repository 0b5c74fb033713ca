"""Draft logits over the target's vocabulary. Vd columns of the draft head, V target vocabulary."""

from __future__ import annotations

import math

import torch


def check_sampled_head(
    distribution: torch.Tensor, vocab_map: torch.Tensor | None, vocab_size: int
) -> None:
    """Raises ValueError where tokens were drawn from columns of [..., Vd] that
    `scatter_to_target_vocab` drops: a token without a q would make acceptance depend on later
    draws."""
    if vocab_map is None and distribution.shape[-1] > vocab_size:
        raise ValueError(
            f"a draft head of {distribution.shape[-1]} columns is sampled for a vocabulary of "
            f"{vocab_size}; mask its padding or give a vocabulary map"
        )


def scatter_to_target_vocab(
    logits: torch.Tensor,
    vocab_map: torch.Tensor | None,
    vocab_size: int,
    *,
    fill: float = -math.inf,
) -> torch.Tensor:
    """Logits [..., Vd] in draft ids -> [..., V] in target ids, `fill` for tokens the draft lacks.

    `vocab_map` [Vd] int64 holds the target's id of each draft id. None means equal ids: columns
    beyond `vocab_size` pad the draft head and are dropped, missing ones are filled. The dtype
    stays. The result may be `logits` itself.
    """
    if vocab_map is None:
        # a negative pad cuts columns off
        missing = vocab_size - logits.shape[-1]
        return torch.nn.functional.pad(logits, (0, missing), value=fill) if missing else logits
    return logits.new_full((*logits.shape[:-1], vocab_size), fill).index_copy_(
        -1, vocab_map, logits
    )
