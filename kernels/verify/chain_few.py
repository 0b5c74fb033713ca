"""Chain verification of a few rows on a CPU: `chain`'s reference, whose dozens of operations on
single numbers are Python's own here. Operations on whole rows of logits stay torch's, and only
the rows that decide are touched.

Legend as in `chain.py`.
"""

from __future__ import annotations

import math

import torch

from draftsmith.kernels.sampling.filters import clean
from draftsmith.kernels.sampling.random_streams import FEW, STREAMS, Purpose
from draftsmith.kernels.verify.residual import (
    log_distribution,
    one_hot_logits,
    residual_distribution,
    wide,
)
from draftsmith.kernels.verify.verdict import Verdict


def is_few(draft_tokens: torch.Tensor) -> bool:
    """True for drafted tokens [B, K] that `verify_chain_few` is faster with."""
    return draft_tokens.device.type == "cpu" and 0 < draft_tokens.numel() <= FEW


def verify_chain_few(
    p_logits: torch.Tensor,
    draft_tokens: torch.Tensor,
    lengths: torch.Tensor,
    q_logits: torch.Tensor | None,
    seeds: torch.Tensor,
    positions: torch.Tensor,
) -> Verdict:
    """As `verify_chain`, with the same bits."""
    num_draft = draft_tokens.shape[1]
    drafts, counts = draft_tokens.tolist(), lengths.tolist()
    log_p = log_distribution(p_logits)
    log_q = None if q_logits is None else log_distribution(q_logits)
    ids = draft_tokens.clamp(min=0)
    token_q = _of_tokens(log_q, ids)
    depths = torch.arange(num_draft)
    log_u = STREAMS.uniform(seeds[:, None], positions[:, None] + depths).log().tolist()

    first, accepted, finals = 0, [], []
    for row, count in enumerate(counts):
        token_p = log_p[first : first + count].gather(1, ids[row, :count, None])[:, 0].tolist()
        kept = 0
        while kept < count and _keeps(
            drafts[row][kept], log_u[row][kept], token_p[kept], token_q[row][kept]
        ):
            kept += 1
        at = slice(first + kept, first + kept + 1)
        final = clean(wide(p_logits[at]))
        if kept < count:
            rest_q = _drawn(log_q, row, kept, drafts[row][kept], token_q[row][kept], log_p[at])
            residual = residual_distribution(log_p[at], rest_q)
            final = residual if residual.amax() > -math.inf else final
        finals.append(final)
        accepted.append(kept)
        first += count + 1
    purposes = [
        int(Purpose.RESIDUAL if kept < count else Purpose.BONUS)
        for kept, count in zip(accepted, counts)
    ]
    found = torch.tensor(accepted)
    emitted = STREAMS.token(
        torch.cat(finals), seeds, positions + found, torch.tensor(purposes)
    ).tolist()
    tokens = [
        [*draft[:kept], last, *[-1] * (num_draft - kept)]
        for draft, kept, last in zip(drafts, accepted, emitted)
    ]
    return Verdict(found, torch.tensor(tokens))


def _of_tokens(log_q: torch.Tensor | None, ids: torch.Tensor) -> list[list[float]]:
    """log q of every drafted token; 0 where drafting was deterministic."""
    if log_q is None:
        return [[0.0] * ids.shape[1]] * len(ids)
    return log_q.gather(-1, ids[..., None])[..., 0].tolist()


def _keeps(token: int, log_u: float, log_p: float, log_q: float) -> bool:
    return token >= 0 and log_u + log_q < log_p and log_q > -math.inf


def _drawn(
    log_q: torch.Tensor | None,
    row: int,
    depth: int,
    token: int,
    token_q: float,
    like: torch.Tensor,
) -> torch.Tensor:
    """log q [1, V] of the rejected token's position; no distribution where it cannot have drawn
    the token."""
    if log_q is None:
        return one_hot_logits(torch.tensor([token]), like)
    if token < 0 or token_q == -math.inf:
        return torch.full_like(like, -math.inf)
    return log_q[row, depth][None]
