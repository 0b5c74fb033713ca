"""Adjustments of one round's requests as tensors of its device: biases, penalties, bans and allowed
ids, worked out there from drafted tokens that the host need not have.

Legend: B requests, R rows of logits, D drafted tokens before a row.
Rows of a table are padded with their own first entry, so that what is written twice is equal.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from typing import NamedTuple

import torch

from draftsmith.kernels.dispatch import reads_freely, sent
from draftsmith.serve.sampling.penalties import CountedTexts, Seen
from draftsmith.serve.sampling.state import SamplingState


class AdjustmentTables(NamedTuple):
    """None: no request asks for it."""

    bias_ids: torch.Tensor | None = None  # [B, n]
    bias_values: torch.Tensor | None = None  # [B, n] float64
    seen: Seen | CountedTexts | None = None
    single: torch.Tensor | None = None  # [B, n] tokens that bad words of one token ban
    has_single: torch.Tensor | None = None  # [B] bool
    ends: torch.Tensor | None = None  # [B, n] tokens that end an answer
    least: torch.Tensor | None = None  # [B] tokens that must still come before these
    allowed: torch.Tensor | None = None  # [B] which of `forbidden`
    forbidden: torch.Tensor | None = None  # [n, V] bool, the first all False
    failed: torch.Tensor | None = None  # [B] bool: no token is left

    @classmethod
    def of(cls, states: Sequence[SamplingState | None], device: torch.device) -> AdjustmentTables:
        """Tables of requests in their order, by one upload."""
        on_host = reads_freely(device)
        known = [state for state in states if state is not None]
        if on_host and not any(map(_needs_table, known)):
            return cls(seen=CountedTexts.of(states))
        columns: list[list[list[int]] | torch.Tensor] = []
        biases = [[] if state is None else list(state.params.logit_bias) for state in states]
        single = [[] if state is None else state.single for state in states]
        # A list without tokens is padded with token 0, which must not be banned.
        least = [state.least_left if state is not None and state.ends else 0 for state in states]
        failed = [state is not None and bool(state.error) for state in states]
        lists = [state.forbidden for state in known if state.forbidden is not None]
        columns += [
            _padded([[token for token, _ in one] for one in biases]),
            _bits([[value for _, value in one] for one in biases]),
            _padded(single),
            [[len(one)] for one in single],
            _padded([
                sorted(state.ends) if state is not None and left > 0 else []
                for state, left in zip(states, least)
            ]),
            [[left] for left in least],
            [[one] for one in numbered([state is not None and state.forbidden is not None
                                         for state in states])],
            [[int(one)] for one in failed],
        ]  # fmt: skip
        penalised = [] if on_host else Seen.columns(states)
        flat = sent(device, *(_flat(column) for column in columns), *penalised)
        parts = [one.view(len(states), -1) for one in flat[: len(columns)]]
        bias_ids, bias_values, words, num_words, ends, left, allowed, broken = parts
        has_ends = ends.shape[1] > 0
        return cls(
            bias_ids if bias_ids.shape[1] else None,
            bias_values.view(torch.float64) if bias_ids.shape[1] else None,
            CountedTexts.of(states) if on_host else Seen.of(flat[len(columns) :], states),
            words if words.shape[1] else None,
            num_words[:, 0] > 0 if words.shape[1] else None,
            ends if has_ends else None,
            left[:, 0] if has_ends else None,
            allowed[:, 0] if lists else None,
            torch.stack([torch.zeros_like(lists[0]), *lists]) if lists else None,
            broken[:, 0] > 0 if any(failed) else None,
        )

    def apply(
        self,
        logits: torch.Tensor,
        rows: torch.Tensor,
        drafted: torch.Tensor,
        owners: Sequence[int] | None,
    ) -> None:
        """Adjust `logits` [R, V] in place.

        Args:
            rows: [R] int64, the request of each row of logits.
            drafted: [R, D] int64, the drafted tokens before each; -1 is none.
            owners: `rows` where the host has them.
        """
        if self.bias_ids is not None and self.bias_values is not None:
            # Of one bias a token, beside zeros: sums do not depend on their order.
            values = self.bias_values[rows].float().to(logits.dtype)
            logits.scatter_add_(1, self.bias_ids[rows], values)
        if self.seen is not None:
            self.seen.penalise(logits, rows, drafted, owners)
        if self.single is not None and self.has_single is not None:
            _ban(logits, self.single[rows], self.has_single[rows])
        if self.ends is not None and self.least is not None:
            early = (drafted >= 0).sum(dim=1) < self.least[rows]
            _ban(logits, self.ends[rows], early)
        self.restrict(logits, rows)

    def restrict(self, logits: torch.Tensor, rows: torch.Tensor) -> None:
        """Leave no token but allowed ones, and none to a request that has failed."""
        if self.allowed is not None and self.forbidden is not None:
            logits.masked_fill_(self.forbidden[self.allowed[rows]], -math.inf)
        if self.failed is not None:
            logits.masked_fill_(self.failed[rows][:, None], -math.inf)


def _needs_table(state: SamplingState) -> bool:
    """True where the request asks for anything but penalties."""
    asked = state.params.logit_bias or state.single or state.forbidden is not None or state.error
    return bool(asked) or (bool(state.ends) and state.least_left > 0)


def _ban(logits: torch.Tensor, tokens: torch.Tensor, rows: torch.Tensor) -> None:
    """Ban `tokens` [R, n] where `rows` [R] say so."""
    scores = logits.gather(1, tokens).masked_fill_(rows[:, None], -math.inf)
    logits.scatter_(1, tokens, scores)


def _padded(lists: Sequence[Sequence[int]]) -> list[list[int]]:
    width = max(map(len, lists), default=0)
    return [[*one, *[one[0] if one else 0] * (width - len(one))] for one in lists]


def _bits(lists: Sequence[Sequence[float]]) -> torch.Tensor:
    """Numbers, padded with 0, as the integers of the same bits."""
    width = max(map(len, lists), default=0)
    rows = [[*one, *[0.0] * (width - len(one))] for one in lists]
    return torch.tensor(rows, dtype=torch.float64).view(torch.int64)


def numbered(flags: Sequence[bool]) -> list[int]:
    """Numbers from 1 for flags that are set, else 0."""
    counter = itertools.count(1)
    return [next(counter) if flag else 0 for flag in flags]


def _flat(rows: Sequence[Sequence[int]] | torch.Tensor) -> Sequence[int] | torch.Tensor:
    if isinstance(rows, torch.Tensor):
        return rows.flatten()
    return list(itertools.chain.from_iterable(rows))
