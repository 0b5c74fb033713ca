"""Score of a draft on served traffic: the alpha that it would have had at every drafted position
whose context became text.

The draft is unrolled over the text, and alpha = sum_v min(p_v, q_v) is taken over the full
vocabulary under the request's own sampling, with p from the target's states that the unroll needs
anyway. q is what the engine of the record draws from, by its `sampler`: one-hot for drafts that are
the draft's likeliest token, of which alpha is p of that token. The 64 tokens of p that a record
holds would prove only a lower bound, far too low for a target whose distributions are flat; they
show whether this target served the text.

With an outline of the target alone (learn.teacher=recorded) alpha is the middle of these bounds, at
positions where p is logged and the states that the draft reads are recorded. Nothing shows whether
this target served the text but its revision.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import torch

from draftsmith.distill.buffer.folder import is_forgotten
from draftsmith.distill.buffer.traffic import ServedText, known_taps, num_readable, padded_taps
from draftsmith.distill.gate.logged import (
    DraftedPositions,
    Position,
    SampledTop,
    disagreement,
    logged_alpha,
    logged_arrays,
    positions_of,
    sampled_top,
    sampling_rows,
)
from draftsmith.drafters.interface import TrainedDrafter, UnrollBatch
from draftsmith.drafters.target.target import Target
from draftsmith.kernels.overlap import probabilities, shared_mass
from draftsmith.kernels.sampling.filters import SamplingRows, process
from draftsmith.kernels.sampling.vocabulary import scatter_to_target_vocab
from draftsmith.train.data.batches import mask_of, padded
from draftsmith.train.objective.outline import TargetOutline
from draftsmith.train.objective.teacher import StateReader

# Rows of full-vocabulary logits held at once.
CHUNK = 512
# Texts whose scores a draft keeps: several windows ask for them, of which some texts are the same.
MOST_KNOWN = 4096
# Mean total variation of a text between logged and own p: a server in another precision differs by
# less, another target by more.
MAX_DISAGREEMENT = 0.1


class Scored(NamedTuple):
    """Scores of one text under one draft: an entry per scored position, in the order of its
    rounds."""

    # [n]; 0 where the draft's distribution is not finite, which is never accepted
    alpha: np.ndarray
    kept: np.ndarray  # [n] whether the token that was really offered there was accepted
    is_consistent: bool  # the logged p agrees with this target
    least: np.ndarray  # [n] alpha that is certain: below it where only bounds are known
    is_finite: bool = True  # all distributions of the draft


# Of a text without a position.
NOT_SCORED = Scored(np.zeros(0), np.zeros(0), True, np.zeros(0))


class Rows(NamedTuple):
    """Tensors [n] on the CPU."""

    alpha: torch.Tensor  # NaN where the draft's distribution is not finite
    disagreement: torch.Tensor
    least: torch.Tensor


class Scorer:
    """Draft with its cached scores: a live draft is scored on a text at every decision, in several
    windows."""

    def __init__(
        self,
        drafter: TrainedDrafter,
        target: Target,
        *,
        max_length: int,
        states: StateReader | None = None,
    ):
        """`states` reads the target's states in its place."""
        self.drafter, self.target, self.max_length = drafter, target, max_length
        self.states = states
        self._known: dict[tuple[str, int], Scored] = {}

    def of(self, drafter: TrainedDrafter) -> Scorer:
        """Scorer of another draft for the same target."""
        return Scorer(drafter, self.target, max_length=self.max_length, states=self.states)

    def take_over(self, other: Scorer) -> None:
        """Adopts the scores of a draft with the same weights."""
        self._known = {**other._known, **self._known}

    def score(self, texts: Sequence[ServedText], *, max_depth: int) -> list[Scored]:
        return score_together([self], texts, max_depth=max_depth)[0]

    def knows(self, request: str, max_depth: int) -> bool:
        return (request, max_depth) in self._known

    def looked_up(
        self, texts: Sequence[ServedText], new: Mapping[str, Scored], max_depth: int
    ) -> list[Scored]:
        """Scores of the texts, of which `new` are the missing ones by request."""
        keys = [(text.request, max_depth) for text in texts]
        asked = {
            key: new[key[0]] if key[0] in new else self._known.pop(key)
            for key in dict.fromkeys(keys)
        }
        # In order of the last request, so that the least recently requested are dropped first.
        kept = list((self._known | asked).items())
        self._known = dict(kept[-max(MOST_KNOWN, len(asked)) :])
        return [asked[key] for key in keys]

    def forget(self, answers: frozenset[str]) -> None:
        self._known = {
            key: one for key, one in self._known.items() if not is_forgotten(key[0], answers)
        }


def score_together(
    scorers: Sequence[Scorer], texts: Sequence[ServedText], *, max_depth: int
) -> list[list[Scored]]:
    """Scores of the texts by scorer, all of the same target. Texts that several of them lack are
    read with one pass of the target."""
    unique = {text.request: text for text in texts}.values()
    by_lack: dict[tuple[int, ...], list[ServedText]] = {}
    for text in unique:
        lack = tuple(
            index for index, one in enumerate(scorers) if not one.knows(text.request, max_depth)
        )
        by_lack.setdefault(lack, []).append(text)
    new: list[dict[str, Scored]] = [{} for _ in scorers]
    by_lack.pop((), None)
    for lack, chosen in by_lack.items():
        found = score_drafters(
            [scorers[index].drafter for index in lack],
            scorers[0].target,
            chosen,
            max_depth=max_depth,
            max_length=scorers[0].max_length,
            states=scorers[0].states,
        )
        for index, scored in zip(lack, found, strict=True):
            new[index] |= {text.request: one for text, one in zip(chosen, scored, strict=True)}
    return [one.looked_up(texts, fresh, max_depth) for one, fresh in zip(scorers, new, strict=True)]


@torch.no_grad()
def score_drafters(
    drafters: Sequence[TrainedDrafter],
    target: Target,
    texts: Sequence[ServedText],
    *,
    max_depth: int,
    max_length: int,
    batch: int = 8,
    states: StateReader | None = None,
) -> list[list[Scored]]:
    """Scores by drafter; those that read the same states share the target's pass."""
    reader = target if states is None else states
    by_taps: dict[tuple[int, ...], list[int]] = {}
    for index, one in enumerate(drafters):
        by_taps.setdefault(one.taps, []).append(index)
    scored: list[list[Scored]] = [[] for _ in drafters]
    for begin in range(0, len(texts), batch):
        part = texts[begin : begin + batch]
        for taps, alike in by_taps.items():
            read = TargetSide.of(target, reader, taps, part, max_length)
            chosen = [drafters[index] for index in alike]
            found = _score_batch(chosen, part, read, max_depth, max_length)
            for index, of_texts in zip(alike, found, strict=True):
                scored[index] += of_texts
    return scored


def _score_batch(
    drafters: Sequence[TrainedDrafter],
    texts: Sequence[ServedText],
    read: TargetSide,
    max_depth: int,
    max_length: int,
) -> list[list[Scored]]:
    is_outline = read.hidden is None
    positions = [
        position
        for row, text in enumerate(texts)
        for position in positions_of(text, row, max_depth=max_depth, max_length=max_length)
        if not is_outline or position.logged.is_known
    ]
    if not positions:
        return [[NOT_SCORED for _ in texts] for _ in drafters]
    unrolled = read.unrolled(positions, max_depth)
    drafted = [DraftedPositions.of(one, unrolled, positions) for one in drafters]
    parts: list[list[Rows]] = [[] for _ in drafters]
    for begin in range(0, len(positions), CHUNK):
        part = slice(begin, begin + CHUNK)
        rows = read.rows(positions[part])
        for one, found in zip(drafted, parts, strict=True):
            found.append(_alphas(one, part, rows, read.target.vocab_size))
    return [
        _by_text(
            len(texts),
            positions,
            one.is_drafted.cpu().numpy(),
            Rows(*(torch.cat(values) for values in zip(*found, strict=True))),
        )
        for one, found in zip(drafted, parts, strict=True)
    ]


def _alphas(drafted: DraftedPositions, part: slice, rows: TargetRows, vocab_size: int) -> Rows:
    logits = scatter_to_target_vocab(drafted.logits(part), drafted.drafter.vocab_map, vocab_size)
    q = probabilities(process(logits, rows.draft_sampling))
    is_finite = has_mass(logits)
    if isinstance(rows.p, SampledTop):
        bounds = torch.where(is_finite.cpu()[:, None], logged_alpha(rows.p, q), math.nan)
        return Rows(bounds.mean(-1), rows.disagreement, bounds[:, 0])
    alpha = torch.where(is_finite, shared_mass(rows.p, q), math.nan).cpu()
    return Rows(alpha, rows.disagreement, alpha)


def has_mass(logits: torch.Tensor) -> torch.Tensor:
    """[n] True where a row of logits [n, V] holds a finite one and no NaN."""
    most = logits.amax(-1)
    if bool(most.isfinite().all()):
        return torch.ones_like(most, dtype=torch.bool)
    return torch.isfinite(logits).any(-1) & ~torch.isnan(logits).any(-1)


def _by_text(
    num_texts: int, positions: Sequence[Position], is_drafted: np.ndarray, found: Rows
) -> list[Scored]:
    alpha, distance, least = (values.numpy() for values in found)
    row = np.array([position.row for position in positions])
    scored = []
    for text in range(num_texts):
        mine = np.flatnonzero((row == text) & is_drafted)
        records = [positions[index].logged for index in mine]
        of_text = alpha[mine].astype(np.float64)
        scored.append(
            Scored(
                np.nan_to_num(of_text),
                np.array([one.depth < one.record.accepted for one in records], dtype=np.float64),
                len(mine) == 0 or float(distance[mine].mean()) <= MAX_DISAGREEMENT,
                np.nan_to_num(least[mine].astype(np.float64)),
                not np.isnan(of_text).any(),
            )
        )
    return scored


class TargetRows(NamedTuple):
    """Values that n positions of a batch are scored with."""

    draft_sampling: SamplingRows
    # [n, V] probabilities as sampled; with an outline alone what is logged of them
    p: torch.Tensor | SampledTop
    disagreement: torch.Tensor  # [n] on the CPU


@dataclass(frozen=True)
class TargetSide:
    """Target's share in the scores of a batch of texts, the same for every draft."""

    target: Target
    ids: torch.Tensor  # [B, L]
    mask: torch.Tensor
    taps: torch.Tensor | None
    hidden: torch.Tensor | None  # None with an outline of the target alone

    @classmethod
    def of(
        cls,
        target: Target,
        reader: StateReader,
        layers: tuple[int, ...],
        texts: Sequence[ServedText],
        max_length: int,
    ) -> TargetSide:
        is_outline = isinstance(target, TargetOutline)
        reads_records = is_outline and bool(layers)
        known = [known_taps(text.records, layers) if reads_records else None for text in texts]
        lengths = [
            min(max_length, num_readable(states)) if reads_records else max_length
            for states in known
        ]
        rows = [
            torch.tensor(text.tokens[:length], device=target.device)
            for text, length in zip(texts, lengths, strict=True)
        ]
        ids, mask = padded(rows), mask_of(rows)
        if not is_outline:
            return cls(target, ids, mask, *reader.states(ids, mask, layers))
        width = len(layers) * target.hidden_size
        taps = padded_taps(known, ids.shape[1], width, target.device) if reads_records else None
        return cls(target, ids, mask, taps, None)

    def unrolled(self, positions: Sequence[Position], num_steps: int) -> UnrollBatch:
        """Inputs of a draft that is scored at the positions."""
        return UnrollBatch(
            input_ids=self.ids,
            attention_mask=self.mask,
            taps=self.taps,
            num_steps=num_steps,
            first=min(one.absolute for one in positions),
        )

    def rows(self, positions: Sequence[Position]) -> TargetRows:
        logged = [position.logged for position in positions]
        device, known = self.ids.device, logged_arrays(logged)
        sampling = sampling_rows(logged, device, of_drafts=True)
        if self.hidden is None:
            return TargetRows(
                sampling, sampled_top(logged, known, device), torch.zeros(len(logged))
            )
        rows = [position.row for position in positions]
        before = [position.absolute - 1 for position in positions]
        logits = self.target.head(self.hidden[rows, before])
        p = probabilities(process(logits, sampling_rows(logged, device)))
        return TargetRows(sampling, p, disagreement(known, logits))
