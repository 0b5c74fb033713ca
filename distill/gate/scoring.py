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
from collections.abc import Sequence
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
from draftsmith.distill.learn.target_outline import TargetOutline
from draftsmith.drafters.interface import UnrollBatch, UnrolledStep, head_of
from draftsmith.drafters.target.target import Target
from draftsmith.kernels.acceptance import likeliest_mass, overlap
from draftsmith.kernels.sampling.filters import process
from draftsmith.kernels.sampling.vocabulary import scatter_to_target_vocab
from draftsmith.train.data.batches import mask_of, padded
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

    def __init__(self, drafter: Unrollable, target: Target, *, max_length: int):
        self.drafter, self.target, self.max_length = drafter, target, max_length
        self._known: dict[tuple[str, int], Scored] = {}

    def score(self, texts: Sequence[ServedText], *, max_depth: int) -> list[Scored]:
        keys = [(text.request, max_depth) for text in texts]
        new = [text for text, key in zip(texts, keys, strict=True) if key not in self._known]
        found = score(
            self.drafter, self.target, new, max_depth=max_depth, max_length=self.max_length
        )
        fresh = {(text.request, max_depth): one for text, one in zip(new, found, strict=True)}
        asked = {
            key: fresh[key] if key in fresh else self._known.pop(key) for key in dict.fromkeys(keys)
        }
        # In order of the last request, so that the least recently requested are dropped first.
        kept = list((self._known | asked).items())
        self._known = dict(kept[-max(MOST_KNOWN, len(asked)) :])
        return [asked[key] for key in keys]

    def forget(self, answers: frozenset[str]) -> None:
        self._known = {
            key: one for key, one in self._known.items() if not is_forgotten(key[0], answers)
        }


@torch.no_grad()
def score(
    drafter: Unrollable,
    target: Target,
    texts: Sequence[ServedText],
    *,
    max_depth: int,
    max_length: int,
    batch: int = 8,
) -> list[Scored]:
    scored: list[Scored] = []
    for begin in range(0, len(texts), batch):
        scored += _score_batch(drafter, target, texts[begin : begin + batch], max_depth, max_length)
    return scored


def _score_batch(
    drafter: Unrollable,
    target: Target,
    texts: Sequence[ServedText],
    max_depth: int,
    max_length: int,
) -> list[Scored]:
    is_outline = isinstance(target, TargetOutline)
    reads_records = is_outline and bool(drafter.taps)
    known = [known_taps(text.records, drafter.taps) if reads_records else None for text in texts]
    lengths = [
        min(max_length, num_readable(states)) if reads_records else max_length for states in known
    ]
    rows = [
        torch.tensor(text.tokens[:length], device=target.device)
        for text, length in zip(texts, lengths, strict=True)
    ]
    ids, mask = padded(rows), mask_of(rows)
    taps, target_hidden = None, None
    if not is_outline:
        taps, target_hidden = target.states(ids, mask, drafter.taps)
    elif reads_records:
        width = len(drafter.taps) * target.hidden_size
        taps = padded_taps(known, ids.shape[1], width, target.device)
    steps = list(
        drafter.unroll(
            UnrollBatch(input_ids=ids, attention_mask=mask, taps=taps, num_steps=max_depth)
        )
    )
    positions = [
        position
        for row, text in enumerate(texts)
        for position in positions_of(text, row, max_depth=max_depth, max_length=max_length)
        if is_drafted(steps, position) and (not is_outline or position.logged.is_known)
    ]
    chunks = [positions[at : at + CHUNK] for at in range(0, len(positions), CHUNK)]
    parts = [_alphas(drafter, target, target_hidden, steps, chunk) for chunk in chunks]
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
    target_hidden: torch.Tensor | None,
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
    if target_hidden is None:
        return Rows(logged_bounds.mean(-1), torch.zeros(len(logged)), logged_bounds)
    rows = [position.row for position in positions]
    before = [position.absolute - 1 for position in positions]
    target_logits = target.head(target_hidden[rows, before])
    p_logits = process(target_logits, sampling_rows(logged, logits.device))
    alpha = overlap(p_logits, q_logits)
    siblings = torch.tensor([one.siblings for one in logged])
    trees = (siblings > 1).nonzero()[:, 0]
    if len(trees):
        alpha[trees] = likeliest_mass(p_logits[trees], logits[trees], siblings[trees])
        logged_bounds[trees] = math.nan
    return Rows(
        torch.where(is_finite, alpha, math.nan).cpu(),
        disagreement(logged, target_logits),
        logged_bounds,
    )


def draft_logits(
    hidden: torch.Tensor, steps: Sequence[UnrolledStep], drafter: Unrollable
) -> torch.Tensor:
    """States [R, H] of the step of each -> [R, Vd] float32."""
    heads = {id(step.head): step.head for step in steps}
    if len(heads) == 1:
        return (hidden @ head_of(steps[0], drafter).T).float()
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
