"""Synthetic acceptance, for sizing a server before a draft exists: drafts are kept at given rates. LOSSY, and text without sense.

Position i is kept, given that all before it were, with chance `rates[i]`, the last rate going on for deeper positions;
what stands in the text then is whatever was drafted. vLLM's `rejection_sample_method: synthetic` serves the same end.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from draftsmith.kernels.sampling.filters import clean
from draftsmith.kernels.sampling.random_streams import Purpose, sample, uniform
from draftsmith.kernels.verify.chain import Verdict, assemble, wide


def verify_synthetic(
    p_logits: torch.Tensor,
    draft_tokens: torch.Tensor,
    lengths: torch.Tensor,
    q_logits: torch.Tensor | None,
    seeds: torch.Tensor,
    positions: torch.Tensor,
    *,
    rates: Sequence[float],
) -> Verdict:
    """Arguments as `verify_chain`'s; neither law says what is kept, only `rates`, each in [0, 1]."""
    num_draft = draft_tokens.shape[1]
    device = p_logits.device
    depths = torch.arange(num_draft, device=device)
    deep = torch.tensor([rates[min(depth, len(rates) - 1)] for depth in range(num_draft)], dtype=torch.float64, device=device)
    keep = (depths < lengths[:, None]) & (uniform(seeds[:, None], positions[:, None] + depths, Purpose.ACCEPT) < deep)
    accepted = keep.long().cumprod(dim=1).sum(dim=1)
    first_rows = torch.cumsum(lengths + 1, 0) - (lengths + 1)
    emitted = sample(clean(wide(p_logits[first_rows + accepted])), seeds, positions + accepted, Purpose.BONUS)
    return Verdict(accepted, assemble(draft_tokens, accepted, emitted))
