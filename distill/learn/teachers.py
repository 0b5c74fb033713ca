"""Distributions that a candidate is trained to match: of the target's own pass, or of the records
alone.

A record holds the target's likeliest tokens at every drafted position, at temperature 1 and without
filters whatever its request asked for: what the target's pass gives there. Nothing is recorded of
prompts, of the token behind a fully accepted draft, and of requests under a penalty, a ban or a
grammar. With records alone such positions are not trained.
A draft that reads states of the target reads those that the server recorded (`--record-taps`), as
far as they go without a hole.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import torch

from draftsmith.distill.buffer.traffic import TrainedRow, filled_taps, known_taps, num_readable
from draftsmith.distill.config import DistillConfig, LearnConfig
from draftsmith.distill.learn.text_states import TextStates
from draftsmith.drafters.interface import TextBatch, TrainedDrafter
from draftsmith.drafters.target.device import load_target
from draftsmith.drafters.target.target import Target
from draftsmith.errors import UserError
from draftsmith.kernels.sampling.top_tokens import TopProbs
from draftsmith.record import ProbArrays, RoundRecord
from draftsmith.train.data.batches import (
    TrainedText,
    packed,
    padded,
    rows_as_long_as_the_longest,
    rows_of,
)
from draftsmith.train.objective.outline import load_outline
from draftsmith.train.objective.teacher import LiveSource, TargetSignals, TargetSource

NO_TOKEN = -1


class DraftedSpan(NamedTuple):
    """Drafted positions of a round, whose text a row holds."""

    record: RoundRecord
    begin: int  # depths
    end: int


class LearningRow(NamedTuple):
    row: TrainedRow
    spans: Sequence[DraftedSpan]
    records: Sequence[RoundRecord] = ()  # of the row's text, for the states that they hold

    @property
    def text(self) -> TrainedText:
        tokens, weights = self.row
        return TrainedText(torch.tensor(tokens, dtype=torch.int64), torch.from_numpy(weights))


class LearningBatch(NamedTuple):
    text: TextBatch
    source: TargetSource
    masked: int  # positions with a weight that are not trained: their distribution is not known

    @property
    def weight(self) -> float:
        return float(self.text.weights.sum(dtype=torch.float64))

    @property
    def tokens(self) -> int:
        return int((self.text.weights > 0).sum())


class LiveTeacher:
    """The target's own pass over every text: distributions at all positions, and taps."""

    keeps_p = False  # trained texts need no recorded distributions

    def __init__(self, target: Target, states: TextStates | None = None):
        """Passes are made by `states`, where given, one per text. Taps of a draft come from the
        pass, too."""
        self.target, self.source = target, LiveSource(target, states)
        self.taps: tuple[int, ...] = ()

    def reads(self, records: Sequence[RoundRecord]) -> bool:
        return True

    def batch(self, rows: Sequence[LearningRow]) -> LearningBatch:
        texts = [one.text for one in rows]
        text = packed([[texts[at] for at in row] for row in arranged(rows)])
        return LearningBatch(text.to(self.target.device), self.source, 0)


class RecordedTeacher:
    """Recorded distributions alone, and recorded states of the layers `taps`. `target` is never
    run."""

    keeps_p = True  # trained texts need their recorded distributions

    def __init__(self, target: Target, taps: tuple[int, ...] = ()):
        self.target, self.taps = target, taps

    def reads(self, records: Sequence[RoundRecord]) -> bool:
        return not self.taps or known_taps(records, self.taps) is not None

    def batch(self, rows: Sequence[LearningRow]) -> LearningBatch:
        if not self.taps:
            return self._batch(rows, None)
        known = [known_taps(one.records, self.taps) for one in rows]
        lost, cut = 0, []
        for one, states in zip(rows, known, strict=True):
            length = num_readable(states)
            lost += int((one.row.weights[length:] > 0).sum())
            cut.append(one._replace(row=one.row.cut(length)))
        batch = self._batch(cut, known)
        return batch._replace(masked=batch.masked + lost)

    def _batch(
        self, rows: Sequence[LearningRow], known: Sequence[torch.Tensor | None] | None
    ) -> LearningBatch:
        """`known` states [m, width] of each text's first positions."""
        spans = [span for one in rows for span in one.spans]
        recorded = recorded_of(spans, self.target.vocab_size)
        ends = itertools.accumulate((len(one.spans) for one in rows), initial=0)
        texts, masked = [], 0
        for one, part in zip(rows, itertools.pairwise(ends), strict=True):
            text = one.text
            index = torch.from_numpy(recorded.index_of(len(one.row.tokens), range(*part)))
            masked += int(((text.weights > 0) & (index < 0)).sum())
            weights = torch.where(index >= 0, text.weights, 0.0)
            texts.append(text._replace(weights=weights, token_index=index))
        places = arranged(rows)
        batch = packed([[texts[at] for at in row] for row in places]).to(self.target.device)
        taps = None
        if known is not None:
            width = len(self.taps) * self.target.hidden_size
            states = [
                filled_taps(one, len(text.input_ids), width)
                for one, text in zip(known, texts, strict=True)
            ]
            taps = padded(rows_of([[states[at] for at in row] for row in places]))
            taps = taps.to(self.target.device)
        return LearningBatch(batch, RecordedSource(recorded.top, taps), masked)


def arranged(rows: Sequence[LearningRow]) -> list[list[int]]:
    """Texts of each row of a batch, by their numbers."""
    return rows_as_long_as_the_longest([len(one.row.tokens) for one in rows])


class RecordedSource(NamedTuple):
    """Distributions of one batch, by `token_index`, and states, from its records."""

    top: TopProbs
    taps: torch.Tensor | None

    def read(self, text: TextBatch, taps: tuple[int, ...]) -> TargetSignals:
        token_index = text.token_index
        assert token_index is not None

        def distributions(row: torch.Tensor, position: torch.Tensor) -> TopProbs:
            chosen = token_index[row, position].cpu()
            return TopProbs(*(values[chosen].to(token_index.device) for values in self.top))

        return TargetSignals(self.taps, distributions)


class RecordedDistributions:
    """Distributions of the spans of a batch, one after another."""

    def __init__(self, spans: Sequence[DraftedSpan], sizes: Sequence[int], top: TopProbs):
        self.spans, self.top = spans, top
        self.bounds = list(itertools.pairwise(itertools.accumulate(sizes, initial=0)))
        self.known = (top.ids[:, 0] != NO_TOKEN).numpy()

    def index_of(self, length: int, numbers: Sequence[int]) -> np.ndarray:
        """[length] number of each token's distribution in a row that holds the spans `numbers`;
        `NO_TOKEN` where none is known."""
        index = np.full(length, NO_TOKEN, dtype=np.int64)
        for number in numbers:
            span, (begin, end) = self.spans[number], self.bounds[number]
            entries = np.arange(begin, end)
            places = span.record.position + span.begin + entries - begin
            chosen = self.known[begin:end] & (places < length)
            index[places[chosen]] = entries[chosen]
        return index


def recorded_of(spans: Sequence[DraftedSpan], vocab_size: int) -> RecordedDistributions:
    """Distributions with a token that is none of the vocabulary count as not known."""
    parts = [one.record.p[one.begin : one.end].arrays for one in spans]
    made = ProbArrays.joined(parts, least=1)
    # A token that is not there must not be taken for token 0.
    ids = np.where(np.isfinite(made.logprobs), made.ids, NO_TOKEN).astype(np.int64)
    ids[(ids >= vocab_size).any(axis=1)] = NO_TOKEN
    top = TopProbs(*map(torch.from_numpy, (ids, made.logprobs, made.tail)))
    return RecordedDistributions(spans, [len(part.tail) for part in parts], top)


def teacher_of(
    config: LearnConfig, target: Target, taps: tuple[int, ...], states: TextStates
) -> LiveTeacher | RecordedTeacher:
    if config.teacher == "live":
        return LiveTeacher(target, states)
    return RecordedTeacher(target, taps)


def check_positions(config: LearnConfig, drafter: TrainedDrafter) -> None:
    """Refuses rejected continuations of a draft that reads states beside learn.teacher=recorded:
    records hold states of committed text."""
    if config.teacher == "recorded" and drafter.taps and "later-rejected" in config.positions:
        raise UserError(
            "learn.positions holds 'later-rejected' with learn.teacher=recorded and a draft that "
            "reads states of the target, of which records hold none there; leave it out, or give "
            "learn.teacher=live"
        )


def open_target(config: DistillConfig, folder: str) -> Target:
    """The target in `folder`, whole or in outline, as the teacher needs it."""
    device, trust = config.device, config.trust_remote_code
    length = config.learn.max_length
    if config.learn.teacher == "recorded":
        return load_outline(folder, device=device, max_length=length, trust_remote_code=trust)
    return load_target(
        folder,
        dtype=config.dtype,
        device=device,
        max_length=length,
        offload=config.target_offload,
        use="step",
        trust_remote_code=trust,
    )
