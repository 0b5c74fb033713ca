"""alpha and tau of distributions: what two of them share, and the rounds that emit a text. Beside
`acceptance.py`, which counts rounds and needs no torch."""

from __future__ import annotations

import math
from typing import NamedTuple

import torch

from draftsmith.kernels.dispatch import reads_freely


def overlap(p_logits: torch.Tensor, q_logits: torch.Tensor) -> torch.Tensor:
    """alpha of distributions given as processed logits [..., V] -> [...]. A row that is all -inf or
    holds NaN is no distribution and gives 0."""
    return shared_mass(probabilities(p_logits), probabilities(q_logits))


def shared_mass(p: torch.Tensor, q: torch.Tensor) -> torch.Tensor:
    """alpha of `probabilities` [..., V] -> [...]."""
    return torch.minimum(p, q).sum(dim=-1)


def probabilities(logits: torch.Tensor) -> torch.Tensor:
    """Probabilities [..., V] of processed logits; 0 in a row that is no distribution."""
    probs = torch.softmax(_widen(logits), dim=-1)
    # Such a row is NaN throughout.
    if reads_freely(probs.device) and not bool(probs[..., :1].isnan().any()):
        return probs
    return probs.nan_to_num(nan=0.0)


def keep_probability(
    p_logits: torch.Tensor, q_logits: torch.Tensor, tokens: torch.Tensor
) -> torch.Tensor:
    """min(1, q(x) / p(x)) for tokens x [...] of distributions [..., V]: the chance that x was
    accepted given that it was emitted."""
    log_p, log_q = _token_logprob(p_logits, tokens), _token_logprob(q_logits, tokens)
    # A token the target gives no mass is never emitted; q / p then only says whether the draft
    # would have offered it.
    ratio = torch.where(log_q == -math.inf, -math.inf, log_q - log_p)
    return ratio.clamp(max=0).exp().nan_to_num(nan=0.0)


def expected_rounds(keep: torch.Tensor) -> float:
    """The expected number of rounds that emit a given text of n tokens, exactly; tau = n /
    expected_rounds.

    `keep[i, s]` [n, K] is the chance that the token at i + s is kept at depth s of a round that
    starts at i, given that it was emitted (`keep_probability`, or 0 and 1 for greedy). The last
    round may run past the text. K = 0 is one round a token.
    """
    return float(walk_rounds(keep).rounds.sum())


class WalkedRounds(NamedTuple):
    """Expected `AcceptanceCounts` of the rounds that emit a text, by the token that a round begins
    at; float64."""

    rounds: torch.Tensor  # [n] chance that a round begins there
    committed: torch.Tensor  # [n] tokens that it then commits; they sum to n
    offered: torch.Tensor  # [n, K]
    accepted: torch.Tensor  # [n, K]


def walk_rounds(keep: torch.Tensor) -> WalkedRounds:
    """The rounds that emit a text, for the `keep` [n, K] of `expected_rounds`.

    A forward walk: a round that starts at i keeps exactly a tokens and the next one starts at i + a
    + 1. Position s of a round is offered where its prefix was kept and the text goes on so far.
    """
    num_tokens, depth = keep.shape
    keep = keep.double().cpu()
    reach = torch.cat([torch.ones(num_tokens, 1, dtype=torch.float64), keep.cumprod(dim=1)], dim=1)
    # P(exactly a kept): reached a and failed there; the last depth cannot fail.
    exactly = reach.clone()
    exactly[:, :-1] -= reach[:, 1:]
    starts = [1.0] + [0.0] * (num_tokens + depth)
    for start, weights in enumerate(exactly.tolist()):
        for kept, weight in enumerate(weights):
            starts[start + kept + 1] += starts[start] * weight
    visited = torch.tensor(starts[:num_tokens], dtype=torch.float64)[:, None]
    left = torch.arange(num_tokens, 0, -1)[:, None]
    committed = visited * exactly * torch.arange(1, depth + 2).minimum(left)
    inside = torch.arange(num_tokens)[:, None] + torch.arange(depth) < num_tokens
    offered = visited * reach[:, :-1] * inside
    return WalkedRounds(visited[:, 0], committed.sum(dim=1), offered, offered * keep)


def _token_logprob(logits: torch.Tensor, tokens: torch.Tensor) -> torch.Tensor:
    logits = _widen(logits)
    return logits.gather(-1, tokens[..., None])[..., 0] - torch.logsumexp(logits, dim=-1)


def _widen(logits: torch.Tensor) -> torch.Tensor:
    return logits if logits.dtype == torch.float64 else logits.float()
