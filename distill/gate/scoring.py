"""Score of a draft on served traffic: the alpha that it would have had at every drafted position
whose context became text.

The draft is unrolled over the text, and alpha = sum_v min(p_v, q_v) is taken over the full
vocabulary under the request's own sampling, with p from the target's states that the unroll needs
anyway. q is what the engine of the record draws from, by its `sampler`: one-hot for drafts that are
the draft's likeliest token, of which alpha is p of that token. The 64 tokens of p that a record
holds would prove only a lower bound, far too low for a target whose distributions are flat; they
show whether this target served the text.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import torch

from draftsmith.distill.buffer.folder import is_forgotten
from draftsmith.distill.buffer.traffic import ServedText
from draftsmith.drafters.interface import UnrollBatch, UnrolledStep, head_of
from draftsmith.drafters.target.target import Target
from draftsmith.kernels.acceptance import probabilities, shared_mass
from draftsmith.kernels.products.float32_products import faster_linears, multiply
from draftsmith.kernels.sampling.filters import SamplingRows, process
from draftsmith.kernels.sampling.vocabulary import scatter_to_target_vocab
from draftsmith.record import Distributions, ProbArrays, RoundRecord, sampler_of
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
    is_consistent: bool  # the logged p agrees with this target
    is_finite: bool = True  # all distributions of the draft


# Of a text without a position.
NOT_SCORED = Scored(np.zeros(0), np.zeros(0), True)


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
    by_taps: dict[tuple[int, ...], list[int]] = {}
    for index, one in enumerate(drafters):
        by_taps.setdefault(one.taps, []).append(index)
    scored: list[list[Scored]] = [[] for _ in drafters]
    with faster_linears(target.device):
        for begin in range(0, len(texts), batch):
            part = texts[begin : begin + batch]
            for alike in by_taps.values():
                chosen = [drafters[index] for index in alike]
                found = _score_batch(chosen, target, reader, part, max_depth, max_length)
                for index, of_texts in zip(alike, found, strict=True):
                    scored[index] += of_texts
    return scored


def _score_batch(
    drafters: Sequence[Unrollable],
    target: Target,
    reader: StateReader,
    texts: Sequence[ServedText],
    max_depth: int,
    max_length: int,
) -> list[list[Scored]]:
    """Scores by drafter; all read the same states."""
    positions = [
        position
        for row, text in enumerate(texts)
        for position in positions_of(text, row, max_depth=max_depth, max_length=max_length)
    ]
    if not positions:
        return [[NOT_SCORED for _ in texts] for _ in drafters]
    rows = [torch.tensor(text.tokens[:max_length], device=target.device) for text in texts]
    ids, mask = padded(rows), mask_of(rows)
    taps, hidden = reader.states(ids, mask, drafters[0].taps)
    unrolled = UnrollBatch(
        input_ids=ids,
        attention_mask=mask,
        taps=taps,
        num_steps=max_depth,
        first=min(one.absolute for one in positions),
    )
    drafted = [DraftedPositions.of(one, unrolled, positions) for one in drafters]
    alphas: list[list[torch.Tensor]] = [[] for _ in drafters]
    distances = []
    for begin in range(0, len(positions), CHUNK):
        part = positions[begin : begin + CHUNK]
        before = [position.absolute - 1 for position in part]
        logits = target.head(hidden[[position.row for position in part], before])
        distances.append(disagreement(logged_arrays(part), logits))
        p = probabilities(process(logits, sampling_rows(part, ids.device)))
        draws = draft_rows(part, ids.device)
        for one, found in zip(drafted, alphas, strict=True):
            drafts = one.logits(slice(begin, begin + CHUNK))
            drafts = scatter_to_target_vocab(drafts, one.drafter.vocab_map, target.vocab_size)
            found.append(_alpha(p, drafts, draws))
    distance = torch.cat(distances).numpy()
    return [
        _by_text(
            len(texts),
            positions,
            one.is_drafted.cpu().numpy(),
            torch.cat(found).numpy().astype(np.float64),
            distance,
        )
        for one, found in zip(drafted, alphas, strict=True)
    ]


def _alpha(p: torch.Tensor, drafts: torch.Tensor, draws: SamplingRows) -> torch.Tensor:
    """[n] on the CPU, of probabilities p [n, V] and a draft's logits [n, V]; NaN where the draft's
    distribution is not finite."""
    q = probabilities(process(drafts, draws))
    return torch.where(has_mass(drafts), shared_mass(p, q), math.nan).cpu()


def has_mass(logits: torch.Tensor) -> torch.Tensor:
    """[n] True where a row of logits [n, V] holds a finite one and no NaN."""
    most = logits.amax(-1)
    if bool(most.isfinite().all()):
        return torch.ones_like(most, dtype=torch.bool)
    return torch.isfinite(logits).any(-1) & ~torch.isnan(logits).any(-1)


def _by_text(
    num_texts: int,
    positions: Sequence[Position],
    is_drafted: np.ndarray,
    alpha: np.ndarray,
    distance: np.ndarray,
) -> list[Scored]:
    row = np.array([position.row for position in positions])
    scored = []
    for text in range(num_texts):
        mine = np.flatnonzero((row == text) & is_drafted)
        chosen = [positions[index] for index in mine]
        scored.append(
            Scored(
                np.nan_to_num(alpha[mine]),
                np.array([one.depth < one.record.accepted for one in chosen], dtype=np.float64),
                len(mine) == 0 or float(distance[mine].mean()) <= MAX_DISAGREEMENT,
                not np.isnan(alpha[mine]).any(),
            )
        )
    return scored


class Position(NamedTuple):
    """One drafted position of a record, whose text is a row of a batch."""

    row: int
    record: RoundRecord
    depth: int

    @property
    def absolute(self) -> int:
        return self.record.position + self.depth


def sampling_rows(positions: Sequence[Position], device: torch.device) -> SamplingRows:
    """Sampling of the requests."""
    return _rows_of([_sampling(one.record) for one in positions], device)


def draft_rows(positions: Sequence[Position], device: torch.device) -> SamplingRows:
    """Sampling that the engine of each position draws its drafts with: alpha of a draft is that of
    its logits under it."""
    return _rows_of([_drawing(one.record) for one in positions], device)


Sampling = tuple[float, int, float, float]  # temperature, top_k, top_p, min_p


def _sampling(record: RoundRecord) -> Sampling:
    return record.temperature, record.top_k, record.top_p, record.min_p


def _drawing(record: RoundRecord) -> Sampling:
    sampler = sampler_of(record)
    if sampler == "unfiltered":
        return record.temperature, 0, 1.0, 0.0
    temperature = 0.0 if sampler == "greedy" else record.temperature
    return temperature, *_sampling(record)[1:]


def _rows_of(settings: Sequence[Sampling], device: torch.device) -> SamplingRows:
    temperature, top_k, top_p, min_p = (list(column) for column in zip(*settings, strict=True))
    return SamplingRows.of(temperature, top_k=top_k, top_p=top_p, min_p=min_p, device=device)


def logged_arrays(logged: Sequence[Position]) -> ProbArrays:
    """Logged p of the positions, as wide as the widest."""
    parts = []
    # Neighbours of one record are taken at once.
    for _, some in itertools.groupby(logged, key=lambda one: id(one.record)):
        group = list(some)
        arrays = Distributions.of(group[0].record.p).arrays
        parts.append(arrays.chosen([one.depth for one in group]))
    return ProbArrays.joined(parts)


def disagreement(known: ProbArrays, target_logits: torch.Tensor) -> torch.Tensor:
    """Total variation [n], on the logged tokens, between the logged p and the distribution of raw
    `target_logits` [n, V]; 0 for a record without logged distributions."""
    if known.ids.shape[1] == 0:
        return torch.zeros(len(known.ids))
    ids, logprobs = (
        torch.from_numpy(values).to(target_logits.device) for values in (known.ids, known.logprobs)
    )
    ids = ids.long()
    if int(ids.max()) >= target_logits.shape[-1]:
        return torch.ones(len(ids))
    ours = target_logits.float().log_softmax(-1).gather(-1, ids).exp()
    difference = torch.where(logprobs == -torch.inf, 0.0, (ours - logprobs.exp()).abs())
    return difference.sum(-1).cpu() / 2


def positions_of(text: ServedText, row: int, *, max_depth: int, max_length: int) -> list[Position]:
    """Accepted positions and the first rejected one of each round, whose context became text."""
    found = []
    for record in text.records:
        # The end of an answer may trim accepted tokens off.
        behind = min(record.accepted, len(record.committed)) + 1
        known = min(len(record.p), behind, max_depth, max_length - record.position)
        found += [Position(row, record, depth) for depth in range(known)]
    return found


@dataclass(frozen=True)
class DraftedPositions:
    """A draft's states at n positions."""

    drafter: Unrollable
    steps: Sequence[UnrolledStep]
    hidden: torch.Tensor  # [n, H], 0 where nothing was drafted
    number: torch.Tensor  # [n] of the step. A language model has one step for all depths.
    is_drafted: torch.Tensor  # [n] bool

    @classmethod
    def of(
        cls, drafter: Unrollable, batch: UnrollBatch, positions: Sequence[Position]
    ) -> DraftedPositions:
        steps = list(drafter.unroll(batch))
        device = batch.input_ids.device
        row, depth, absolute = torch.tensor(
            [(one.row, one.depth, one.absolute) for one in positions], device=device
        ).T
        number = depth.clamp(max=len(steps) - 1)
        hidden = steps[0].hidden.new_zeros(len(positions), steps[0].hidden.shape[-1])
        is_drafted = torch.zeros(len(positions), dtype=torch.bool, device=device)
        for index, step in enumerate(steps):
            column = absolute - step.offset
            # The last known position may lie one behind the text when a stop string cut it.
            is_inside = (number == index) & (column >= 0) & (column < step.valid.shape[1])
            mine = is_inside.nonzero()[:, 0]
            hidden[mine] = step.hidden[row[mine], column[mine]]
            is_drafted[mine] = step.valid[row[mine], column[mine]]
        return cls(drafter, steps, hidden, number, is_drafted)

    def logits(self, part: slice) -> torch.Tensor:
        """[n, Vd] float32 of the positions of `part`."""
        hidden, number = self.hidden[part], self.number[part]
        heads = [head_of(step, self.drafter) for step in self.steps]
        if all(head is heads[0] for head in heads):
            return multiply(hidden, heads[0].T).float()
        logits = hidden.new_empty(len(hidden), heads[0].shape[0])
        for index, head in enumerate(heads):
            mine = number == index
            logits[mine] = multiply(hidden[mine], head.T)
        return logits.float()
