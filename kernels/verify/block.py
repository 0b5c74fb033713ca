"""Block verification: the drafted tokens of a round are judged together, which keeps more of them
than one after the other.

Reach r_i is the weight of the path after i drafts: r_0 = 1, r_i = min(r_{i-1} p(x_i) / q(x_i), 1).
With the mass m_i = sum_v max(r_i p(v) - q(v), 0) of the distributions after those i drafts, the
round may stop there with chance h_i = m_i / (m_i + 1 - r_i), or h_k = r_k after the last one. It
stops at the latest i whose own uniform is below h_i, and emits a draw from max(r_i p - q, 0), or
from p after the last draft. Sun et al. 2025 (arXiv:2403.10444), Algorithm 2.

The output distribution is the target's and the expected number of kept tokens is at least a
chain's. Unlike a chain's, what stands at the first draft depends on the last one, so that the next
round must not draft with the noise of this one even where nothing between the two looks at it, see
`randomness.round_seeds`. Without draft distributions (deterministic drafts) the chance to keep i
tokens is p(x_1) ... p(x_i) either way, so that the chain does it.

Legend: B requests, K draft positions, V vocabulary, R = sum(lengths + 1) rows of target logits.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import torch

from draftsmith.kernels.dispatch import operation
from draftsmith.kernels.sampling.filters import clean
from draftsmith.kernels.sampling.random_streams import STREAMS, Draws, Purpose
from draftsmith.kernels.verify.chain import verify_chain
from draftsmith.kernels.verify.residual import (
    assemble,
    log_distribution,
    residual_distribution,
    rows_before,
    wide,
)
from draftsmith.kernels.verify.verdict import Verdict


class BlockDistribution(NamedTuple):
    """Reach of N drafted paths of K tokens, and the chances to stop on them."""

    log_reach: torch.Tensor  # [N, K + 1]
    # [N, K + 1], h_i in float64; h_0 is 1, for the path without drafts stands; 0 beyond a row's
    # last draft
    stop: torch.Tensor
    last: torch.Tensor  # [N] int64, the number of drafts that count


def block_distribution(
    log_p: torch.Tensor, log_q: torch.Tensor, tokens: torch.Tensor, lengths: torch.Tensor
) -> BlockDistribution:
    """The block's reaches and chances to stop, of logprobs log_p [N, K + 1, V] and log_q [N, K, V]
    and drafts [N, K]."""
    depth = tokens.shape[1]
    places = torch.arange(depth + 1, device=tokens.device)
    offered = (places[:depth] < lengths[:, None]) & (tokens >= 0)
    ids = torch.where(offered, tokens, 0)[..., None]
    token_log_p, token_log_q = (
        log_p[:, :depth].gather(-1, ids)[..., 0],
        log_q.gather(-1, ids)[..., 0],
    )
    drawn = offered & (token_log_q > -math.inf)
    last = drawn.long().cumprod(dim=1).sum(dim=1)
    log_ratio = torch.where(places[:depth] < last[:, None], token_log_p - token_log_q, -math.inf)
    reaches = [torch.zeros_like(log_p[:, 0, 0])]
    for step in range(depth):
        reaches.append((reaches[-1] + log_ratio[:, step]).clamp(max=0))
    log_reach = torch.stack(reaches, dim=1)
    residual = residual_distribution(log_p[:, 1:depth] + log_reach[:, 1:depth, None], log_q[:, 1:])
    mass = residual.exp().sum(dim=-1, dtype=torch.float64)
    short = -torch.expm1(log_reach[:, 1:depth].double())
    stop = torch.nn.functional.pad(mass / torch.where(mass > 0, mass + short, 1), (1, 1), value=1.0)
    stop = torch.where(places == last[:, None], log_reach.double().exp(), stop)
    return BlockDistribution(log_reach, torch.where(places <= last[:, None], stop, 0), last)


@operation
def verify_block(
    p_logits: torch.Tensor,
    draft_tokens: torch.Tensor,
    lengths: torch.Tensor,
    q_logits: torch.Tensor | None,
    seeds: torch.Tensor,
    positions: torch.Tensor,
    *,
    draws: Draws = STREAMS,
    sizes: torch.Tensor | None = None,
    impl: str = "auto",
) -> Verdict:
    """`verify_chain`, with the same arguments and edge cases, that judges each row's drafted tokens
    as one block.

    The drafts must come from `round_seeds(seeds, positions)` or from a generator of their own. A
    token that its distribution could not have drawn ends its row's block. Test i has number i of
    the ACCEPT stream at the row's first position.
    """
    if q_logits is None or draft_tokens.shape[1] == 0:
        return verify_chain(
            p_logits, draft_tokens, lengths, None, seeds, positions,
            draws=draws, sizes=sizes, impl="torch",
        )  # fmt: skip
    num_rows, num_draft = draft_tokens.shape
    device = p_logits.device
    first_rows = rows_before(lengths, sizes)
    places = torch.arange(num_draft + 1, device=device)
    p_rows = first_rows[:, None] + torch.minimum(places, lengths[:, None])
    log_p, log_q = log_distribution(p_logits), log_distribution(q_logits)
    # Rows of full length need no copy.
    log_p = (
        log_p.view(num_rows, num_draft + 1, log_p.shape[-1])
        if len(log_p) == p_rows.numel()
        else log_p[p_rows]
    )
    distribution = block_distribution(log_p, log_q, draft_tokens, lengths)
    uniforms = draws.uniform(seeds[:, None], positions[:, None], places - 1)
    # Test i + 1 is of the path after i + 1 drafts; the path without any always stands.
    stands = uniforms[:, 1:] < distribution.stop[:, 1:]
    accepted = torch.where(stands, places[1:], 0).amax(dim=1)

    final_logits = clean(wide(p_logits[first_rows + accepted]))
    cut = accepted < distribution.last
    at = torch.arange(num_rows, device=device)[cut], accepted[cut]
    residual = residual_distribution(log_p[at] + distribution.log_reach[at][:, None], log_q[at])
    has_mass = (residual > -math.inf).any(dim=-1, keepdim=True)
    final_logits[cut] = torch.where(has_mass, residual, final_logits[cut])
    purposes = torch.where(accepted < lengths, int(Purpose.RESIDUAL), int(Purpose.BONUS))
    emitted = draws.token(final_logits, seeds, positions + accepted, purposes)
    return Verdict(accepted, assemble(draft_tokens, accepted, emitted))
