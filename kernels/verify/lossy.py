"""Typical acceptance (Medusa, arXiv:2401.10774, section 2.3.1): keeps what is likely enough. LOSSY:
not the target's distribution.

A drafted token is kept while p(x) > min(epsilon, delta exp(-H(p))), H the entropy of the target's
distribution there; the token after the kept ones is drawn from p. At temperature 0 that is the
greedy rule. An opt-in, for speed.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from draftsmith.kernels.dispatch import sent_tensor
from draftsmith.kernels.sampling.filters import clean
from draftsmith.kernels.sampling.random_streams import Purpose, sample, uniform
from draftsmith.kernels.verify.residual import assemble, log_distribution, rows_before, wide
from draftsmith.kernels.verify.verdict import Verdict

EPSILON = 0.09
DELTA = 0.3


def verify_typical(
    p_logits: torch.Tensor,
    draft_tokens: torch.Tensor,
    lengths: torch.Tensor,
    q_logits: torch.Tensor | None,
    seeds: torch.Tensor,
    positions: torch.Tensor,
    *,
    sizes: torch.Tensor | None = None,
    epsilon: float = EPSILON,
    delta: float = DELTA,
) -> Verdict:
    """Arguments as `verify_chain`'s; the draft's distribution `q_logits` plays no part."""
    log_p = log_distribution(p_logits)
    first_rows = rows_before(lengths, sizes)
    depths = torch.arange(draft_tokens.shape[1], device=p_logits.device)
    offered = (depths < lengths[:, None]) & (draft_tokens >= 0)
    rows = torch.where(offered, first_rows[:, None] + depths, 0)
    token_probs = log_p[rows, draft_tokens.clamp(min=0)].exp()
    entropy = torch.special.entr(log_p.exp()).sum(dim=-1)
    keep = offered & (token_probs > (delta * torch.exp(-entropy)).clamp(max=epsilon)[rows])
    accepted = keep.long().cumprod(dim=1).sum(dim=1)
    emitted = sample(
        clean(wide(p_logits[first_rows + accepted])), seeds, positions + accepted, Purpose.BONUS
    )
    return Verdict(accepted, assemble(draft_tokens, accepted, emitted))


def verify_synthetic(
    p_logits: torch.Tensor,
    draft_tokens: torch.Tensor,
    lengths: torch.Tensor,
    q_logits: torch.Tensor | None,
    seeds: torch.Tensor,
    positions: torch.Tensor,
    *,
    sizes: torch.Tensor | None = None,
    rates: Sequence[float],
) -> Verdict:
    """Arguments as `verify_chain`'s; neither distribution says what is kept, only `rates`, each in
    [0, 1]."""
    num_draft = draft_tokens.shape[1]
    device = p_logits.device
    depths = torch.arange(num_draft, device=device)
    deep = sent_tensor(
        device,
        torch.tensor(
            [rates[min(depth, len(rates) - 1)] for depth in range(num_draft)], dtype=torch.float64
        ),
    )
    keep = (depths < lengths[:, None]) & (
        uniform(seeds[:, None], positions[:, None] + depths, Purpose.ACCEPT) < deep
    )
    accepted = keep.long().cumprod(dim=1).sum(dim=1)
    first_rows = rows_before(lengths, sizes)
    emitted = sample(
        clean(wide(p_logits[first_rows + accepted])), seeds, positions + accepted, Purpose.BONUS
    )
    return Verdict(accepted, assemble(draft_tokens, accepted, emitted))
