"""Chain verification: which drafted tokens stand, and the one token after them, so that the output law is the target's.

Draft token x at a position, drawn from q, is kept when log u + log q(x) < log p(x). The first one that is not kept is
replaced by a draw from the residual max(p - q, 0); when all are kept, one more token is drawn from p (the bonus).
Leviathan et al. 2023 (arXiv:2211.17192), Chen et al. 2023 (arXiv:2302.01318).

Legend: B requests, K draft positions, V vocabulary, R = sum(lengths + 1) rows of target logits.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import torch

from draftsmith.kernels.dispatch import choose
from draftsmith.kernels.filters import clean
from draftsmith.kernels.randomness import Purpose, race, stream_keys, uniform


class Verdict(NamedTuple):
    accepted: torch.Tensor  # [B] int64, how many drafted tokens were kept
    tokens: torch.Tensor  # [B, K + 1] int64: the kept drafts, the residual or bonus token, then -1


def verify_chain(
    p_logits: torch.Tensor,
    draft_tokens: torch.Tensor,
    lengths: torch.Tensor,
    q_logits: torch.Tensor | None,
    seeds: torch.Tensor,
    positions: torch.Tensor,
    *,
    impl: str = "auto",
) -> Verdict:
    """Keeps a prefix of each row's drafted tokens and draws the next one.

    Args:
        p_logits: [R, V] processed target logits; row b owns `lengths[b] + 1` consecutive ones.
        draft_tokens: [B, K] int64; entries at `lengths[b]` and beyond are not read. A negative one is always rejected.
        lengths: [B] int64, 0 <= lengths[b] <= K.
        q_logits: [B, K, V] processed draft logits, the very law each token was drawn from; None when drafting was
            deterministic (q is one-hot). A deterministic row in a batch with laws is 0 at its token and -inf elsewhere.
        seeds: [B] int64.
        positions: [B] int64, absolute position of each row's first drafted token.
        impl: "auto", "triton" or "torch".

    NaN counts as -inf. A token with p(x) = 0 or q(x) = 0 is never kept. A residual without mass (p = q up to rounding) falls
    back to p. When the deciding row of p is all -inf there is no law to draw from and the emitted token is -1.
    """
    if impl == "auto" and p_logits.dtype == torch.float64:
        impl = "torch"  # the Triton kernels compute in float32
    if choose(impl, p_logits.device) == "triton":
        from draftsmith.kernels.verify_triton import verify_chain_triton

        return verify_chain_triton(p_logits, draft_tokens, lengths, q_logits, seeds, positions)
    return verify_chain_torch(p_logits, draft_tokens, lengths, q_logits, seeds, positions)


def verify_chain_torch(
    p_logits: torch.Tensor,
    draft_tokens: torch.Tensor,
    lengths: torch.Tensor,
    q_logits: torch.Tensor | None,
    seeds: torch.Tensor,
    positions: torch.Tensor,
) -> Verdict:
    """The reference. Computes in the dtype of the logits, float32 at least."""
    num_rows, num_draft = draft_tokens.shape
    device = p_logits.device
    p_logits = _as_law(p_logits)
    q_logits = None if q_logits is None else _as_law(q_logits)
    first_rows = torch.cumsum(lengths + 1, 0) - (lengths + 1)
    depths = torch.arange(num_draft, device=device)
    offered = depths < lengths[:, None]
    p_rows = torch.where(offered, first_rows[:, None] + depths, 0)
    ids = draft_tokens.clamp(min=0)
    log_p = token_logprob(p_logits, p_rows, ids)
    log_q = torch.zeros_like(log_p) if q_logits is None else _drafted_logprob(q_logits, ids)
    row_seeds, row_positions = seeds[:, None].expand(-1, num_draft), positions[:, None] + depths
    log_u = uniform(row_seeds.reshape(-1), row_positions.reshape(-1), Purpose.ACCEPT).log().view(num_rows, num_draft)
    keep = offered & (draft_tokens >= 0) & accepts(log_u, log_p, log_q)
    accepted = keep.long().cumprod(dim=1).sum(dim=1)
    rejected = accepted < lengths

    final_p = p_logits[first_rows + accepted]
    final_logits = final_p
    if num_draft:
        at = torch.arange(num_rows, device=device), accepted.clamp(max=num_draft - 1)
        final_q = one_hot_logits(draft_tokens[at], final_p) if q_logits is None else q_logits[at]
        final_logits = torch.where(rejected[:, None], residual_logits(final_p, final_q), final_p)
    purposes = torch.where(rejected, int(Purpose.RESIDUAL), int(Purpose.BONUS))
    emitted = race(final_logits, stream_keys(seeds, positions + accepted, purposes))
    return Verdict(accepted, assemble(draft_tokens, accepted, emitted))


def accepts(log_u: torch.Tensor, log_p: torch.Tensor, log_q: torch.Tensor) -> torch.Tensor:
    """u q(x) < p(x), strictly, so that p(x) = 0 is never kept; q(x) = 0 cannot have been drawn from q and is not kept either."""
    return (log_u + log_q < log_p) & (log_q > -math.inf)


def residual_logits(p_logits: torch.Tensor, q_logits: torch.Tensor) -> torch.Tensor:
    """log max(p - q, 0) of laws given as logits [N, V]; rows without any such mass fall back to p."""
    log_p, log_q = _log_softmax(p_logits), _log_softmax(q_logits)
    # log(p - q) = log p + log(1 - exp(log q - log p)), without the cancellation of p - q in a narrow float.
    gap = torch.where(log_q == -math.inf, -math.inf, log_q - log_p)
    residual = torch.where(gap < 0, log_p + torch.log(-torch.expm1(gap)), -math.inf)
    has_mass = (residual > -math.inf).any(dim=-1, keepdim=True)
    return torch.where(has_mass, residual, p_logits)


def one_hot_logits(tokens: torch.Tensor, like: torch.Tensor) -> torch.Tensor:
    """The law of deterministic drafting: 0 at `tokens` [N], -inf elsewhere; a negative token gives a law without mass."""
    at_token = torch.where(tokens >= 0, 0.0, -math.inf).to(like.dtype)
    return torch.full_like(like, -math.inf).scatter_(-1, tokens.clamp(min=0)[:, None], at_token[:, None])


def token_logprob(logits: torch.Tensor, rows: torch.Tensor, ids: torch.Tensor) -> torch.Tensor:
    """log-probability of `ids` under the laws `logits[rows]`; rows and ids of one shape."""
    normaliser = torch.logsumexp(logits, dim=-1)
    logprob = logits[rows, ids] - normaliser[rows]
    return torch.where(normaliser[rows] == -math.inf, -math.inf, logprob)


def assemble(draft_tokens: torch.Tensor, accepted: torch.Tensor, emitted: torch.Tensor) -> torch.Tensor:
    """[B, K] drafts, [B] counts and [B] last tokens -> [B, K + 1] tokens, -1 padded."""
    columns = torch.arange(draft_tokens.shape[1] + 1, device=draft_tokens.device)
    drafts = torch.nn.functional.pad(draft_tokens, (0, 1), value=-1)
    tokens = torch.where(columns < accepted[:, None], drafts, -1)
    return torch.where(columns == accepted[:, None], emitted[:, None], tokens)


def _drafted_logprob(q_logits: torch.Tensor, ids: torch.Tensor) -> torch.Tensor:
    flat = q_logits.flatten(0, 1)
    rows = torch.arange(len(flat), device=flat.device).view(ids.shape)
    return token_logprob(flat, rows, ids)


def _log_softmax(logits: torch.Tensor) -> torch.Tensor:
    """log-softmax in which an all -inf row stays -inf instead of turning to NaN."""
    normaliser = torch.logsumexp(logits, dim=-1, keepdim=True)
    return torch.where(normaliser == -math.inf, -math.inf, logits - normaliser)


def _as_law(logits: torch.Tensor) -> torch.Tensor:
    return clean(logits if logits.dtype == torch.float64 else logits.float())
