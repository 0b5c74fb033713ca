"""Sampled tokens beside the distributions they should have, as tensors; and biases planted in them,
which the audit must detect."""

from __future__ import annotations

import bisect
from collections.abc import Sequence
from typing import NamedTuple

import torch

from draftsmith.kernels.statistics import log_evidence
from draftsmith.serve.audit.reference import CoarseDistribution, DistributionBook, Text
from draftsmith.serve.audit.samples import Samples

STEPS = 13  # planted biases: the largest, and each 1 / sqrt(2) of the one before
# outcomes that are no token: all tokens that the distribution does not name, and none
REST, PADDING = -1, -2


class AuditTokens(NamedTuple):
    """n sampled tokens, m outcomes each: the likeliest tokens, in order, and the rest."""

    probs: torch.Tensor  # [n, m] float64, of each token given its own prefix
    drawn: torch.Tensor  # [n] int64, the outcome
    groupings: tuple[torch.Tensor, ...]  # each [n, m] int64: outcomes that may share one bias
    depths: torch.Tensor  # [n] int64, see `Depths`

    def at(self, depth: int) -> AuditTokens:
        keep = self.depths == depth
        return AuditTokens(
            self.probs[keep],
            self.drawn[keep],
            tuple(cells[keep] for cells in self.groupings),
            self.depths[keep],
        )

    def __len__(self) -> int:
        return len(self.drawn)

    def evidence(self, drawn: torch.Tensor | None = None) -> float:
        """Natural logarithm of the evidence against the distributions; of `drawn` in place of the
        drawn outcomes when it is given."""
        return log_evidence(self.probs, self.drawn if drawn is None else drawn, self.groupings)


def tokens_of(
    distributions: DistributionBook, samples: Sequence[Samples], depths: Sequence[int]
) -> AuditTokens:
    """Tokens of all continuations, in order, with their `depths`."""
    found: list[CoarseDistribution] = []
    tokens: list[int] = []
    prefixes: list[int] = []
    last: list[int] = []
    known: dict[Text, int] = {}
    for context, continuations, _ in samples:
        for continuation in continuations:
            for length, token in enumerate(continuation):
                text = (*context, *continuation[:length])
                found.append(distributions[text])
                tokens.append(token)
                prefixes.append(known.setdefault(text, len(known)))
                last.append(text[-1])
    probs, ids = outcomes(found)
    same = ids == torch.tensor(tokens)[:, None]
    drawn = torch.where(
        same.any(dim=1), same.long().argmax(dim=1), (ids == REST).long().argmax(dim=1)
    )
    ranks = torch.arange(ids.shape[1]).expand_as(ids)
    groupings = (
        ranks,
        numbered(ids),
        numbered(ids, torch.tensor(last)),
        numbered(ids, torch.tensor(prefixes)),
    )
    return AuditTokens(probs, drawn, groupings, torch.tensor(depths))


def outcomes(distributions: Sequence[CoarseDistribution]) -> tuple[torch.Tensor, torch.Tensor]:
    """Probabilities [n, m] and token ids [n, m] of distributions, the rest last; shorter ones are
    padded."""
    width = max(len(distribution.ids) for distribution in distributions) + 1
    probs = [
        [*distribution.probs, distribution.rest] + [0.0] * (width - 1 - len(distribution.ids))
        for distribution in distributions
    ]
    ids = [
        [*distribution.ids, REST] + [PADDING] * (width - 1 - len(distribution.ids))
        for distribution in distributions
    ]
    table = torch.tensor(probs, dtype=torch.float64)
    return table / table.sum(dim=1, keepdim=True), torch.tensor(ids)


def numbered(ids: torch.Tensor, beside: torch.Tensor | None = None) -> torch.Tensor:
    """Cells [n, m]: one per token id, or per id and number [n] of its row."""
    pairs = ids - ids.min()
    if beside is not None:
        pairs = pairs + beside[:, None] * (pairs.max() + 1)
    return pairs.unique(return_inverse=True)[1].view(ids.shape)


def detectable(tokens: AuditTokens, threshold: float, seed: int, share: float = 1.0) -> float:
    """Smallest planted bias whose evidence reaches `threshold`, as the mean total variation of the
    tokens that have it, a `share` of all; 1 where the largest is not detected."""
    planting = Planting(tokens, seed, share)

    def is_missed(step: int) -> bool:
        return tokens.evidence(planting.drawn(2 ** (-step / 2))) < threshold

    num_seen = bisect.bisect_left(range(STEPS), True, key=is_missed)
    return planting.bias(2 ** (-(num_seen - 1) / 2)) if num_seen else 1.0


class Planting:
    """A bias that takes tokens out of the likelier half of their distribution and draws them from
    the other half.

    Of strength c: where the likelier half has probability h, c h (1 - h) moves over.
    """

    def __init__(self, tokens: AuditTokens, seed: int, share: float):
        generator = torch.Generator().manual_seed(seed)
        self.tokens, half = tokens, likelier_half(tokens.probs)
        self.mass = (tokens.probs * half).sum(dim=1)
        rest = tokens.probs.masked_fill(half, 0.0)
        rest[rest.sum(dim=1) == 0, -1] = 1.0  # of sure tokens, which are never moved
        self.others = torch.multinomial(rest, 1, generator=generator)[:, 0]
        self.chances = torch.rand(len(tokens), generator=generator, dtype=torch.float64)
        self.planted = torch.rand(len(tokens), generator=generator) < share
        self.inside = half.gather(1, tokens.drawn[:, None])[:, 0] & self.planted

    def drawn(self, strength: float) -> torch.Tensor:
        return torch.where(
            self.inside & (self.chances < strength * (1 - self.mass)),
            self.others,
            self.tokens.drawn,
        )

    def bias(self, strength: float) -> float:
        return strength * float((self.mass * (1 - self.mass)).mean())


def likelier_half(probs: torch.Tensor) -> torch.Tensor:
    """[n, m] bool: of outcomes in falling order (the rest last), the first ones that come nearest
    to half of the probability, at least one."""
    reach = probs.cumsum(dim=1)
    count = (reach - 0.5).abs().argmin(dim=1)
    return torch.arange(probs.shape[1]) <= count[:, None]
