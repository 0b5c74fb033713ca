"""Adjustments of one round's requests as tensors of its device: biases, penalties, bans and allowed
ids, worked out there from drafted tokens that the host need not have.

Legend: B requests, R rows of logits, D drafted tokens before a row, W most tokens of a request's
table, V vocabulary. What is written twice is equal.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from typing import NamedTuple

import torch

from draftsmith.kernels.dispatch import sent
from draftsmith.serve.sampling.state import NONE, SamplingState, TokenTable

NO_TOKENS = TokenTable({}).columns


class AdjustmentTables(NamedTuple):
    """None: no request asks for it."""

    tokens: TokenTables | None
    allowed: torch.Tensor | None  # [B] which of `forbidden`
    forbidden: torch.Tensor | None  # [n, V] bool, the first all False

    @classmethod
    def of(cls, states: Sequence[SamplingState | None], device: torch.device) -> AdjustmentTables:
        """Tables of requests in their order, by one upload."""
        lists = [None if state is None else state.forbidden for state in states]
        own = [one for one in lists if one is not None]
        which = [numbered([one is not None for one in lists])] if own else []
        columns = sent(device, *TokenTables.on_host(states), *which)
        tokens = TokenTables.of(columns, states) if len(columns) > 1 else None
        if not own:
            return cls(tokens, None, None)
        return cls(tokens, columns[-1], torch.stack([torch.zeros_like(own[0]), *own]))

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
        if self.tokens is not None:
            self.tokens.apply(logits, rows, drafted, owners)
        self.restrict(logits, rows)

    def restrict(self, logits: torch.Tensor, rows: torch.Tensor) -> None:
        """Leave no token but allowed ones."""
        if self.allowed is not None and self.forbidden is not None:
            logits.masked_fill_(self.forbidden[self.allowed[rows]], -math.inf)


def numbered(flags: Sequence[bool]) -> list[int]:
    """Numbers from 1 for flags that are set, else 0."""
    counter = itertools.count(1)
    return [next(counter) if flag else 0 for flag in flags]


class TokenTables(NamedTuple):
    """Those of the requests, padded with their own first token; of a request without one, a token
    that nothing changes."""

    asked: list[bool]  # [B] True for requests that have one
    columns: torch.Tensor  # [B, 5, W], as `TokenTable.columns`
    # [B, 4] float64: repetition, frequency and presence penalty, and how many tokens must still
    # come before the answer may end
    values: torch.Tensor

    @classmethod
    def on_host(cls, states: Sequence[SamplingState | None]) -> list[torch.Tensor]:
        """int64 columns for `of`, none where no request has a table."""
        tables = [
            NO_TOKENS if state is None or state.table is None else state.table.columns
            for state in states
        ]
        if all(table is NO_TOKENS for table in tables):
            return []
        width = max([table.shape[1] for table in tables])
        padded = [
            table
            if table.shape[1] == width
            else torch.cat([table, table[:, :1].expand(-1, width - table.shape[1])], dim=1)
            for table in tables
        ]
        values = [
            (*NONE, 0) if state is None else (*state.penalties, state.least_left)
            for state in states
        ]
        flat = torch.tensor(values, dtype=torch.float64).view(torch.int64).flatten()
        return [torch.stack(padded).flatten(), flat]

    @classmethod
    def of(
        cls, columns: Sequence[torch.Tensor], states: Sequence[SamplingState | None]
    ) -> TokenTables:
        """Build from the columns of `on_host`, on the device."""
        asked = [state is not None and state.table is not None for state in states]
        tables, values = (column.view(len(states), -1) for column in columns[:2])
        return cls(asked, tables.unflatten(1, (len(NO_TOKENS), -1)), values.view(torch.float64))

    def apply(
        self,
        logits: torch.Tensor,
        rows: torch.Tensor,
        drafted: torch.Tensor,
        owners: Sequence[int] | None,
    ) -> None:
        """Biases, then transformers' repetition penalty, then OpenAI's frequency and presence, then
        bans, on `logits` [R, V] in place. Where the host has `owners`, rows of requests that ask
        for none of them cost nothing."""
        lines = torch.arange(len(rows), device=rows.device)
        if owners is not None and not all(self.asked):
            (lines,) = sent(
                logits.device, [row for row, owner in enumerate(owners) if self.asked[owner]]
            )
            rows, drafted = rows[lines], drafted[lines]
        columns = self.columns[rows]
        if drafted.shape[1]:
            columns = _with_drafted(columns, drafted)
        ids, bias, output, prompt, end = columns.unbind(dim=1)
        *penalties, left = self.values[rows].T[:, :, None]
        where = lines[:, None], ids
        scores = logits[where] + bias.view(torch.float64).float().to(logits.dtype)
        scores = _penalised(scores, [one.to(logits.dtype) for one in penalties], output, prompt)
        early = (drafted >= 0).sum(dim=1, keepdim=True) < left
        logits.index_put_(where, scores.masked_fill_(early & (end > 0), -math.inf))


def _with_drafted(columns: torch.Tensor, drafted: torch.Tensor) -> torch.Tensor:
    """Tables [R, 5, W] with the `drafted` tokens [R, D], which are counted as the answer's."""
    none = drafted < 0
    same = drafted[:, :, None] == columns[:, 0, None]  # [R, D, W]
    known, at = same.byte().max(dim=2)
    columns[:, 2] += same.sum(dim=1)
    # In place of none the first token again.
    at, known = at.masked_fill(none, 0), (known > 0) | none
    own = columns.gather(2, at[:, None].expand(-1, columns.shape[1], -1)) * known[:, None]
    times = (drafted[:, :, None] == drafted[:, None]).sum(dim=2)
    own[:, 0] = torch.where(none, own[:, 0], drafted)
    own[:, 2] = torch.where(known, own[:, 2], times)
    return torch.cat([columns, own], dim=2)


def _penalised(
    scores: torch.Tensor,
    penalties: Sequence[torch.Tensor],
    output: torch.Tensor,
    prompt: torch.Tensor,
) -> torch.Tensor:
    """`scores` [R, N] of tokens that stand `output` [R, N] times in the output, and in the prompt
    or not; `penalties` [R, 1] each."""
    repetition, frequency, presence = penalties
    in_output = output > 0
    repeated = torch.where(scores < 0, scores * repetition, scores / repetition)
    scores = torch.where(in_output | (prompt > 0), repeated, scores)
    return scores - frequency * output.to(scores.dtype) - presence * in_output
