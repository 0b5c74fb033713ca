"""Parts of rejection sampling shared by the rules: the acceptance test and the residual
distribution."""

from __future__ import annotations

import math

import torch

from draftsmith.kernels.dispatch import reads_freely
from draftsmith.kernels.sampling.filters import clean


def accepts(log_u: torch.Tensor, log_p: torch.Tensor, log_q: torch.Tensor) -> torch.Tensor:
    """u q(x) < p(x), strictly, so that p(x) = 0 is never kept; q(x) = 0 cannot have been drawn from
    q and is not kept either."""
    return (log_u + log_q < log_p) & (log_q > -math.inf)


def residual_distribution(log_p: torch.Tensor, log_q: torch.Tensor) -> torch.Tensor:
    """log max(p - q, 0) of distributions given as logprobs [N, V]; -inf everywhere when p = q."""
    # log(p - q) = log p + log(1 - exp(log q - log p)), without the cancellation of p - q in a
    # narrow float.
    gap = log_q - log_p  # NaN where both are -inf, where no mass is left either
    # Of positive numbers alone: a CPU's logarithm of others takes ten times as long.
    share = torch.expm1(gap).neg_().clamp_(min=torch.finfo(gap.dtype).tiny)
    return share.log_().add_(log_p).masked_fill_(~(gap < 0), -math.inf)


def drawn_distribution(log_q: torch.Tensor, tokens: torch.Tensor) -> torch.Tensor:
    """log_q [N, V] where it can have drawn `tokens` [N]; elsewhere no distribution, whose residual
    is p."""
    drawn = (tokens >= 0) & (log_q.gather(-1, tokens.clamp(min=0)[:, None])[:, 0] > -math.inf)
    return log_q.masked_fill(~drawn[:, None], -math.inf)


def one_hot_logits(tokens: torch.Tensor, like: torch.Tensor) -> torch.Tensor:
    """The distribution of deterministic drafting: 0 at `tokens` [N], -inf elsewhere; a negative
    token gives a distribution without mass."""
    at_token = torch.where(tokens >= 0, 0.0, -math.inf).to(like.dtype)
    return torch.full_like(like, -math.inf).scatter_(
        -1, tokens.clamp(min=0)[:, None], at_token[:, None]
    )


def log_distribution(logits: torch.Tensor) -> torch.Tensor:
    """Log-probabilities [..., V] of logits; NaN counts as -inf, and a row without mass is -inf
    everywhere."""
    distribution = torch.log_softmax(wide(logits), dim=-1)
    # One NaN, one +inf or no mass at all makes the whole row NaN, so one column is enough. Where
    # that look would be a wait, all of it is done.
    if reads_freely(logits.device) and not bool(distribution[..., :1].isnan().any()):
        return distribution
    distribution = torch.log_softmax(clean(wide(logits)), dim=-1)
    return torch.where(distribution.isnan(), -math.inf, distribution)


def rows_before(lengths: torch.Tensor, sizes: torch.Tensor | None) -> torch.Tensor:
    """[B] int64, the first row of logits of each request, which owns `sizes[b] + 1` of them,
    `lengths[b] + 1` where none is given."""
    owned = (lengths if sizes is None else sizes) + 1
    return torch.cumsum(owned, 0) - owned


def assemble(
    draft_tokens: torch.Tensor, accepted: torch.Tensor, emitted: torch.Tensor
) -> torch.Tensor:
    """[B, K] drafts, [B] counts and [B] last tokens -> [B, K + 1] tokens, -1 padded."""
    columns = torch.arange(draft_tokens.shape[1] + 1, device=draft_tokens.device)
    drafts = torch.nn.functional.pad(draft_tokens, (0, 1), value=-1)
    tokens = torch.where(columns < accepted[:, None], drafts, -1)
    return torch.where(columns == accepted[:, None], emitted[:, None], tokens)


def wide(logits: torch.Tensor) -> torch.Tensor:
    """float32 at least."""
    return logits if logits.dtype == torch.float64 else logits.float()
