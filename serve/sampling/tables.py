"""Adjustments of one round's requests as tensors of its device: biases, penalties, bans and allowed
ids, worked out there from drafted tokens that the host need not have.

Legend: B requests, R rows of logits, D drafted tokens before a row, M distinct tokens of all
penalised texts, N pairs of a row and a token. Rows of a table are padded with their own first
entry, so that what is written twice is equal; those of biases with a bias of 0.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch.nn.utils.rnn import pad_sequence

from draftsmith.kernels.dispatch import reads_freely, sent
from draftsmith.serve.sampling.state import NO_BIAS, SamplingState, TokenCounts

NONE = (1.0, 0.0, 0.0)  # penalties that change nothing
ID_BITS = 32  # of a key
TOKEN = (1 << ID_BITS) - 1


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
        biases = [NO_BIAS if state is None else state.bias for state in states]
        single = [[] if state is None else state.single for state in states]
        # A list without tokens is padded with token 0, which must not be banned.
        least = [state.least_left if state is not None and state.ends else 0 for state in states]
        failed = [state is not None and bool(state.error) for state in states]
        lists = [state.forbidden for state in known if state.forbidden is not None]
        columns += [
            pad_sequence([one.ids for one in biases], batch_first=True),
            pad_sequence([one.values for one in biases], batch_first=True).view(torch.int64),
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


def numbered(flags: Sequence[bool]) -> list[int]:
    """Numbers from 1 for flags that are set, else 0."""
    counter = itertools.count(1)
    return [next(counter) if flag else 0 for flag in flags]


def _flat(rows: Sequence[Sequence[int]] | torch.Tensor) -> Sequence[int] | torch.Tensor:
    if isinstance(rows, torch.Tensor):
        return rows.flatten()
    return list(itertools.chain.from_iterable(rows))


class Seen(NamedTuple):
    """Tokens that occur in the texts of penalised requests, one text behind another."""

    lengths: list[int]  # [B] distinct tokens of each text; 0: no penalty
    keys: torch.Tensor  # [M] request << ID_BITS | token, ascending
    output: torch.Tensor  # [M] how often in the output
    prompt: torch.Tensor  # [M] bool: whether in the prompt
    begins: torch.Tensor  # [B] of each text
    sizes: torch.Tensor  # [B] `lengths`
    penalties: torch.Tensor  # [B, 3] float64: repetition, frequency, presence

    @classmethod
    def columns(cls, states: Sequence[SamplingState | None]) -> list[torch.Tensor]:
        """int64 columns of the host for `of`, none where no request has a penalty."""
        known = [
            (row, state.counts)
            for row, state in enumerate(states)
            if state is not None and state.counts is not None
        ]
        if not known:
            return []
        sizes = torch.tensor(_lengths(states))
        values = [NONE if state is None else state.penalties for state in states]
        return [
            torch.cat([counts.ids[counts.order] + (row << ID_BITS) for row, counts in known]),
            torch.cat([counts.output[counts.order] for _, counts in known]),
            torch.cat([counts.prompt[counts.order] for _, counts in known]),
            sizes.cumsum(0) - sizes,
            sizes,
            torch.tensor(values, dtype=torch.float64).view(torch.int64).flatten(),
        ]

    @classmethod
    def of(
        cls, columns: Sequence[torch.Tensor], states: Sequence[SamplingState | None]
    ) -> Seen | None:
        """Build from the `columns` of `states`, on the device."""
        if not columns:
            return None
        keys, output, prompt, begins, sizes, penalties = columns
        values = penalties.view(torch.float64).view(-1, 3)
        return cls(_lengths(states), keys, output, prompt > 0, begins, sizes, values)

    def penalise(
        self,
        logits: torch.Tensor,
        rows: torch.Tensor,
        drafted: torch.Tensor,
        owners: Sequence[int] | None,
    ) -> None:
        """transformers' repetition penalty, then OpenAI's frequency and presence, on `logits`
        [R, V] in place.

        Args:
            rows: [R] int64, the request of each row of logits.
            drafted: [R, D] int64; -1 is none.
            owners: `rows` where the host has them: then rows without a penalty cost nothing, and a
                short text is not padded to a long one.
        """
        chosen, widths = list(range(len(rows))), [max(self.lengths)] * len(rows)
        if owners is not None:
            chosen = [row for row, owner in enumerate(owners) if self.lengths[owner]]
            widths = [self.lengths[owners[row]] for row in chosen]
        if not any(widths):
            return
        at, room = sent(logits.device, chosen, widths)
        rows = rows[at]
        pairs = self._pairs(rows, drafted[at], room, sum(widths), padded=owners is None)
        penalties = self.penalties[rows].to(logits.dtype).T[:, pairs.lines]
        where = (at[pairs.lines], pairs.ids)
        logits.index_put_(where, _penalised(logits[where], penalties, pairs.output, pairs.prompt))

    def _pairs(
        self,
        rows: torch.Tensor,
        drafted: torch.Tensor,
        room: torch.Tensor,
        num_pairs: int,
        *,
        padded: bool,
    ) -> _Pairs:
        """Pairs of `rows` [R] with their texts' tokens, `room` [R] of each, and with the drafted
        ones. Padding is a text's first token again. What is there twice has the same counts."""
        every_row = torch.arange(len(rows), device=rows.device)
        lines = every_row.repeat_interleave(room, output_size=num_pairs)
        first, begins = room.cumsum(0) - room, self.begins[rows]
        shift = (begins - first)[lines]
        slots = torch.arange(num_pairs, device=rows.device) + shift
        if padded:
            slots = torch.where(slots < (begins + self.sizes[rows])[lines], slots, begins[lines])
        # A request without a text, penalised by nothing, may begin behind the last one.
        read = slots.clamp(max=len(self.keys) - 1) if padded else slots
        ids, output, prompt = self.keys[read] & TOKEN, self.output[read], self.prompt[read]
        at, known = self._found(rows, drafted)
        places = torch.where(known, first[:, None] + at - begins[:, None], 0)
        output.index_add_(0, places.flatten(), known.long().flatten())
        if padded:
            output = output[slots - shift]
        times = (drafted[:, :, None] == drafted[:, None, :]).sum(dim=2)
        own = (
            torch.where(drafted < 0, part[first][:, None], mine).flatten()
            for part, mine in (
                (ids, drafted),
                (output, times + self.output[at] * known),
                (prompt, self.prompt[at] & known),
            )
        )
        more = (every_row.repeat_interleave(drafted.shape[1]), *own)
        return _Pairs(*map(torch.cat, zip((lines, ids, output, prompt), more)))

    def _found(
        self, rows: torch.Tensor, drafted: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Places of the `drafted` tokens [R, D] in the texts, and which of them are there."""
        wanted = (rows[:, None] << ID_BITS) + drafted
        at = torch.searchsorted(self.keys, wanted).clamp(max=len(self.keys) - 1)
        return at, self.keys[at] == wanted


class CountedTexts(NamedTuple):
    """Penalties on a CPU, row by row: what no request of a row has asked for costs nothing."""

    states: Sequence[SamplingState | None]

    @classmethod
    def of(cls, states: Sequence[SamplingState | None]) -> CountedTexts | None:
        """None where no request has a penalty."""
        return cls(states) if any(_lengths(states)) else None

    def penalise(
        self,
        logits: torch.Tensor,
        rows: torch.Tensor,
        drafted: torch.Tensor,
        owners: Sequence[int] | None,
    ) -> None:
        """As `Seen.penalise`, with the same bits."""
        owners = rows.tolist() if owners is None else owners
        for row, owner in enumerate(owners):
            state = self.states[owner]
            if state is not None and state.counts is not None:
                prefix = [token for token in drafted[row].tolist() if token >= 0]
                ids, output, prompt = _counts_behind(state.counts, prefix)
                # As tensors, since numbers of Python are not rounded to the type of the logits.
                penalties = torch.tensor(state.penalties, dtype=torch.float64).to(logits.dtype)
                scores = logits[row]
                found = _penalised(scores.index_select(0, ids), penalties, output, prompt)
                scores.index_copy_(0, ids, found)


def _counts_behind(
    counts: TokenCounts, prefix: Sequence[int]
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """(tokens, how often in the output, whether in the prompt) of a text behind drafted tokens."""
    ids, output, prompt = counts.ids, counts.output, counts.prompt
    if not prefix:
        return ids, output, prompt
    if fresh := [token for token in dict.fromkeys(prefix) if token not in counts.places]:
        ids = torch.cat([ids, torch.tensor(fresh)])
        prompt = torch.cat([prompt, prompt.new_zeros(len(fresh))])
    added = {token: len(counts.places) + number for number, token in enumerate(fresh)}
    at = torch.tensor([added[one] if one in added else counts.places[one] for one in prefix])
    output = torch.cat([output, output.new_zeros(len(fresh))])
    return ids, output.index_add_(0, at, torch.ones_like(at)), prompt


def _penalised(
    scores: torch.Tensor, penalties: torch.Tensor, output: torch.Tensor, prompt: torch.Tensor
) -> torch.Tensor:
    """`scores` [N] of tokens that stand `output` [N] times in the output, and in the prompt or not;
    `penalties` [3] or [3, N]."""
    repetition, frequency, presence = penalties.unbind()
    in_output = output > 0
    repeated = torch.where(scores < 0, scores * repetition, scores / repetition)
    scores = torch.where(in_output | prompt, repeated, scores)
    return scores - frequency * output.to(scores.dtype) - presence * in_output


class _Pairs(NamedTuple):
    lines: torch.Tensor  # [N] which of the rows
    ids: torch.Tensor  # [N]
    output: torch.Tensor  # [N] how often in the output, drafted tokens included
    prompt: torch.Tensor  # [N] bool


def _lengths(states: Sequence[SamplingState | None]) -> list[int]:
    counts = (None if state is None else state.counts for state in states)
    return [0 if one is None else len(one.ids) for one in counts]
