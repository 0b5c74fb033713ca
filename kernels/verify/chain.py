"""Chain verification: which drafted tokens stand, and the one token after them, so that the output
distribution is the target's.

Draft token x at a position, drawn from q, is kept when log u + log q(x) < log p(x). The first one
that is not kept is replaced by a draw from the residual max(p - q, 0); when all are kept, one more
token is drawn from p (the bonus). Leviathan et al. 2023 (arXiv:2211.17192), Chen et al. 2023
(arXiv:2302.01318).

Legend: B requests, K draft positions, V vocabulary, R = sum(lengths + 1) rows of target logits.
"""

from __future__ import annotations

import math

import torch

from draftsmith.kernels.dispatch import choose
from draftsmith.kernels.sampling.filters import clean
from draftsmith.kernels.sampling.random_streams import STREAMS, Draws, Purpose
from draftsmith.kernels.verify.residual import (
    accepts,
    assemble,
    drawn_distribution,
    log_distribution,
    one_hot_logits,
    residual_distribution,
    rows_before,
    wide,
)
from draftsmith.kernels.verify.verdict import Verdict


def verify_chain(
    p_logits: torch.Tensor,
    draft_tokens: torch.Tensor,
    lengths: torch.Tensor,
    q_logits: torch.Tensor | None,
    seeds: torch.Tensor,
    positions: torch.Tensor,
    *,
    sizes: torch.Tensor | None = None,
    impl: str = "auto",
) -> Verdict:
    """Keeps a prefix of each row's drafted tokens and draws the next one.

    Args:
        p_logits: [R, V] processed target logits; row b owns `sizes[b] + 1` consecutive ones.
        draft_tokens: [B, K] int64; entries at `lengths[b]` and beyond are not read. A negative one
        is always rejected.
        lengths: [B] int64, 0 <= lengths[b] <= K.
        q_logits: [B, K, V] processed draft logits, the very distribution each token was drawn from;
        None when drafting was
            deterministic (q is one-hot). A deterministic row in a batch with distributions is 0 at
            its token and -inf elsewhere.
        seeds: [B] int64.
        positions: [B] int64, absolute position of each row's first drafted token.
        sizes: [B] int64, at least the lengths, which they are where none are given: drafted tokens
        that the pass had of each row.
        impl: "auto", "triton" or "torch".

    NaN counts as -inf. A token with p(x) = 0 or q(x) = 0 is never kept. A token that its
    distribution could not have drawn (negative, or q(x) = 0) counts as no draft: what replaces it
    is drawn from p. A residual without mass (p = q up to rounding) falls back to p. When the
    deciding row of p is all -inf there is no distribution to draw from and the emitted token is -1.
    """
    if choose(impl, p_logits.device, p_logits.dtype) == "triton":
        from draftsmith.kernels.verify.chain_triton import verify_chain_triton

        return verify_chain_triton(
            p_logits, draft_tokens, lengths, q_logits, seeds, positions, sizes=sizes
        )
    return verify_chain_torch(
        p_logits, draft_tokens, lengths, q_logits, seeds, positions, sizes=sizes
    )


def verify_chain_torch(
    p_logits: torch.Tensor,
    draft_tokens: torch.Tensor,
    lengths: torch.Tensor,
    q_logits: torch.Tensor | None,
    seeds: torch.Tensor,
    positions: torch.Tensor,
    *,
    draws: Draws = STREAMS,
    sizes: torch.Tensor | None = None,
) -> Verdict:
    """The reference. Computes in the dtype of the logits, float32 at least; random numbers come
    from `draws`."""
    num_rows, num_draft = draft_tokens.shape
    device = p_logits.device
    log_p = log_distribution(p_logits)
    first_rows = rows_before(lengths, sizes)
    depths = torch.arange(num_draft, device=device)
    offered = (depths < lengths[:, None]) & (draft_tokens >= 0)
    p_rows = torch.where(offered, first_rows[:, None] + depths, 0)
    ids = torch.where(offered, draft_tokens, 0)
    places = torch.arange(num_rows, device=device)
    log_q = None if q_logits is None else log_distribution(q_logits)
    token_log_q = 0.0 if log_q is None else log_q.gather(-1, ids[..., None])[..., 0]
    log_u = draws.uniform(seeds[:, None], positions[:, None] + depths).log()
    keep = offered & accepts(log_u, log_p[p_rows, ids], torch.as_tensor(token_log_q, device=device))
    accepted = keep.long().cumprod(dim=1).sum(dim=1)
    rejected = accepted < lengths

    final_rows = first_rows + accepted
    final_logits = clean(wide(p_logits[final_rows]))
    if bool(rejected.any()):
        at = places[rejected], accepted[rejected]
        rest_p = log_p[final_rows[rejected]]
        rest_q = (
            one_hot_logits(draft_tokens[at], rest_p)
            if log_q is None
            else drawn_distribution(log_q[at], draft_tokens[at])
        )
        residual = residual_distribution(rest_p, rest_q)
        # A choice of rows, which is several times cheaper than one of numbers.
        kept = residual.amax(dim=-1) > -math.inf
        final_logits[rejected.nonzero()[kept, 0]] = residual[kept]
    purposes = torch.where(rejected, int(Purpose.RESIDUAL), int(Purpose.BONUS))
    emitted = draws.token(final_logits, seeds, positions + accepted, purposes)
    return Verdict(accepted, assemble(draft_tokens, accepted, emitted))
