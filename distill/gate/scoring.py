"""Score of a draft on served traffic: the alpha that it would have had at every drafted position
whose context became text.

The draft is unrolled over the text, and alpha = sum_v min(p_v, q_v) is taken over the full
vocabulary under the request's own sampling, with p from the target's states that the unroll needs
anyway. q is what the engine of the record draws from, by its `sampler`: one-hot for drafts that are
the draft's likeliest token, of which alpha is p of that token. The 64 tokens of p that a record
holds would prove only a lower bound, far too low for a target whose distributions are flat; they
show whether this target served the text. Where they suffice, the alpha that they give is returned
beside it: it does not depend on the learner's own target.

With an outline of the target alone (learn.teacher=recorded) alpha is the middle of these bounds, at
positions where p is logged and the states that the draft reads are recorded. Nothing shows whether
this target served the text but its revision.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np
import torch

from draftsmith.distill.buffer.known_taps import known_taps, num_readable, padded_taps
from draftsmith.distill.buffer.marks import is_forgotten
from draftsmith.distill.buffer.traffic import ServedText
from draftsmith.distill.gate.logged import (
    Logged,
    disagreement,
    draft_rows,
    logged_alpha,
    sampling_rows,
)
from draftsmith.drafters.interface import UnrollBatch, UnrolledStep, head_of
from draftsmith.drafters.remote.outline import TargetOutline
from draftsmith.drafters.target.target import Target
from draftsmith.kernels.acceptance import likeliest_mass, overlap
from draftsmith.kernels.products.float32_products import faster_linears, multiply
from draftsmith.kernels.sampling.filters import process
from draftsmith.kernels.sampling.vocabulary import scatter_to_target_vocab
from draftsmith.train.data.batches import mask_of, padded
from draftsmith.train.objective.teacher import StateReader
from draftsmith.train.objective.unrolled_loss import Unrollable

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
    version: list[str]  # [n] the draft that really offered it
    is_consistent: bool  # the logged p agrees with this target
    logged: np.ndarray  # [n, 2] bounds of alpha from the logged p alone; NaN where none is logged
    is_finite: bool = True  # all distributions of the draft
    is_bounded: bool = False  # alpha is the middle of `logged`

    @property
    def least(self) -> np.ndarray:
        """[n] alpha that is certain."""
        return np.nan_to_num(self.logged[:, 0]) if self.is_bounded else self.alpha


class Position(NamedTuple):
    row: int  # of the batch
    logged: Logged

    @property
    def absolute(self) -> int:
        return self.logged.record.position + self.logged.depth


class Rows(NamedTuple):
    """Tensors [n], or [n, 2], on the CPU."""

    alpha: torch.Tensor  # NaN where the draft's distribution is not finite
    disagreement: torch.Tensor
    logged: torch.Tensor


class Scorer:
    """Draft with its cached scores: a live draft is scored on a text at every decision, in several
    windows."""

    def __init__(
        self,
        drafter: Unrollable,
        target: Target,
        *,
        max_length: int,
        states: StateReader | None = None,
    ):
        """`states` reads the target's states in its place."""
        self.drafter, self.target, self.max_length = drafter, target, max_length
        self.states = states
        self._known: dict[tuple[str, int], Scored] = {}

    def of(self, drafter: Unrollable) -> Scorer:
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


def score(
    drafter: Unrollable,
    target: Target,
    texts: Sequence[ServedText],
    *,
    max_depth: int,
    max_length: int,
    batch: int = 8,
) -> list[Scored]:
    return score_drafters(
        [drafter], target, texts, max_depth=max_depth, max_length=max_length, batch=batch
    )[0]


@torch.no_grad()
def score_drafters(
    drafters: Sequence[Unrollable],
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
    scored: list[list[Scored]] = [[] for _ in drafters]
    with faster_linears(target.device):
        for begin in range(0, len(texts), batch):
            part = texts[begin : begin + batch]
            read: dict[tuple[int, ...], TargetSide] = {}
            for one, found in zip(drafters, scored, strict=True):
                if one.taps not in read:
                    read[one.taps] = TargetSide.of(target, reader, one.taps, part, max_length)
                found += _score_batch(one, target, part, read[one.taps], max_depth, max_length)
    return scored


@dataclass
class TargetSide:
    """Target's share in the scores of a batch of texts, the same for every draft."""

    ids: torch.Tensor  # [B, L]
    mask: torch.Tensor
    taps: torch.Tensor | None
    hidden: torch.Tensor | None  # None with an outline of the target alone
    # of the logged p, by the row and the place of a position
    disagreement: dict[tuple[int, int], float] = field(default_factory=dict)

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
            return cls(ids, mask, *reader.states(ids, mask, layers))
        width = len(layers) * target.hidden_size
        taps = padded_taps(known, ids.shape[1], width, target.device) if reads_records else None
        return cls(ids, mask, taps, None)

    def disagreements(self, positions: Sequence[Position], logits: torch.Tensor) -> torch.Tensor:
        """[n] by `logits` [n, V] of the target; of positions that no draft before was scored at,
        they are computed."""
        keys = [(one.row, one.absolute) for one in positions]
        new = [index for index, key in enumerate(keys) if key not in self.disagreement]
        if new:
            found = disagreement([positions[index].logged for index in new], logits[new])
            self.disagreement |= zip((keys[index] for index in new), found.tolist(), strict=True)
        return torch.tensor([self.disagreement[key] for key in keys])


def _score_batch(
    drafter: Unrollable,
    target: Target,
    texts: Sequence[ServedText],
    read: TargetSide,
    max_depth: int,
    max_length: int,
) -> list[Scored]:
    is_outline = read.hidden is None
    steps = list(
        drafter.unroll(
            UnrollBatch(
                input_ids=read.ids, attention_mask=read.mask, taps=read.taps, num_steps=max_depth
            )
        )
    )
    positions = [
        position
        for row, text in enumerate(texts)
        for position in positions_of(text, row, max_depth=max_depth, max_length=max_length)
        if is_drafted(steps, position) and (not is_outline or position.logged.is_known)
    ]
    chunks = [positions[at : at + CHUNK] for at in range(0, len(positions), CHUNK)]
    parts = [_alphas(drafter, target, read, steps, chunk) for chunk in chunks]
    nothing = Rows(torch.zeros(0), torch.zeros(0), torch.zeros(0, 2))
    alphas = Rows(*(torch.cat(values) for values in zip(nothing, *parts, strict=True)))
    scored = [_gather(row, positions, alphas) for row in range(len(texts))]
    return [one._replace(is_bounded=is_outline) for one in scored]


def positions_of(text: ServedText, row: int, *, max_depth: int, max_length: int) -> list[Position]:
    """Accepted positions and the first rejected one of each round."""
    found = []
    for record in text.records:
        known = min(len(record.p), record.accepted + 1, max_depth, max_length - record.position)
        found += [Position(row, Logged(record, depth)) for depth in range(known)]
    return found


def step_of(steps: Sequence[UnrolledStep], depth: int) -> UnrolledStep:
    """Step of the unroll for a depth. A language model has one step for all depths."""
    return steps[min(depth, len(steps) - 1)]


def is_drafted(steps: Sequence[UnrolledStep], position: Position) -> bool:
    step = step_of(steps, position.logged.depth)
    column = position.absolute - step.offset
    # The last known position may lie one behind the text when a stop string cut it.
    return 0 <= column < step.valid.shape[1] and bool(step.valid[position.row, column])


def _alphas(
    drafter: Unrollable,
    target: Target,
    read: TargetSide,
    steps: Sequence[UnrolledStep],
    positions: Sequence[Position],
) -> Rows:
    chosen = [step_of(steps, position.logged.depth) for position in positions]
    hidden = torch.stack(
        [
            step.hidden[one.row, one.absolute - step.offset]
            for step, one in zip(chosen, positions, strict=True)
        ]
    )
    logits = scatter_to_target_vocab(
        draft_logits(hidden, chosen, drafter), drafter.vocab_map, target.vocab_size
    )
    logged = [position.logged for position in positions]
    q_logits = process(logits, draft_rows(logged, logits.device))
    is_finite = torch.isfinite(logits).any(-1) & ~torch.isnan(logits).any(-1)
    logged_bounds = torch.where(is_finite.cpu()[:, None], logged_alpha(logged, q_logits), math.nan)
    if read.hidden is None:
        return Rows(logged_bounds.mean(-1), torch.zeros(len(logged)), logged_bounds)
    rows = [position.row for position in positions]
    before = [position.absolute - 1 for position in positions]
    target_logits = target.head(read.hidden[rows, before])
    p_logits = process(target_logits, sampling_rows(logged, logits.device))
    alpha = overlap(p_logits, q_logits)
    siblings = torch.tensor([one.siblings for one in logged])
    trees = (siblings > 1).nonzero()[:, 0]
    if len(trees):
        alpha[trees] = likeliest_mass(p_logits[trees], logits[trees], siblings[trees])
        logged_bounds[trees] = math.nan
    return Rows(
        torch.where(is_finite, alpha, math.nan).cpu(),
        read.disagreements(positions, target_logits),
        logged_bounds,
    )


def draft_logits(
    hidden: torch.Tensor, steps: Sequence[UnrolledStep], drafter: Unrollable
) -> torch.Tensor:
    """States [R, H] of the step of each -> [R, Vd] float32."""
    heads = {id(step.head): step.head for step in steps}
    if len(heads) == 1:
        return multiply(hidden, head_of(steps[0], drafter).T).float()
    return torch.stack(
        [head_of(step, drafter) @ state for step, state in zip(steps, hidden, strict=True)]
    ).float()


def _gather(row: int, positions: Sequence[Position], alphas: Rows) -> Scored:
    mine = [index for index, position in enumerate(positions) if position.row == row]
    logged = [positions[index].logged for index in mine]
    kept = np.array([one.depth < one.record.accepted for one in logged], dtype=np.float64)
    is_consistent = not mine or float(alphas.disagreement[mine].mean()) <= MAX_DISAGREEMENT
    alpha = alphas.alpha[mine].double().numpy()
    versions = [one.record.draft_version for one in logged]
    is_finite = not np.isnan(alpha).any()
    return Scored(
        np.nan_to_num(alpha),
        kept,
        versions,
        is_consistent,
        alphas.logged[mine].double().numpy(),
        is_finite,
    )
