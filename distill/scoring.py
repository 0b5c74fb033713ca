"""The alpha that a draft would have had on logged traffic: sum_v min(p_v, q_v) with p from the records and q from an unroll."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import torch

from draftsmith.distill.logged_law import Logged, processed_law, sampling_rows
from draftsmith.distill.traffic import ServedText
from draftsmith.drafters.interface import UnrollBatch, UnrolledStep
from draftsmith.drafters.target import Target
from draftsmith.kernels.filters import process
from draftsmith.kernels.laws import top_overlap
from draftsmith.train.objective import Unrollable

# Rows of full-vocabulary draft logits held at once.
CHUNK = 512


class Scored(NamedTuple):
    """One text under one draft: an entry for each scored position, in the order of its rounds."""

    alpha: np.ndarray  # [n] proven overlap: the listed 64 tokens, without what the tail might add
    kept: np.ndarray  # [n] whether the token that was really offered there was accepted
    version: list[str]  # [n] the draft that really offered it


class Position(NamedTuple):
    row: int  # of the batch
    logged: Logged

    @property
    def absolute(self) -> int:
        return self.logged.record.position + self.logged.depth


def positions_of(text: ServedText, row: int, *, max_depth: int, max_length: int) -> list[Position]:
    """Drafted positions whose context is committed text: the accepted ones and the first rejected one of each round."""
    found = []
    for record in text.records:
        known = min(len(record.p), record.accepted + 1, max_depth, max_length - record.position)
        found += [Position(row, Logged(record, depth)) for depth in range(known)]
    return found


@torch.no_grad()
def score(
    drafter: Unrollable, target: Target, texts: Sequence[ServedText], *, max_depth: int, max_length: int, batch: int = 8
) -> list[Scored]:
    scored: list[Scored] = []
    for begin in range(0, len(texts), batch):
        scored += _score_batch(drafter, target, texts[begin : begin + batch], max_depth, max_length)
    return scored


def _score_batch(
    drafter: Unrollable, target: Target, texts: Sequence[ServedText], max_depth: int, max_length: int
) -> list[Scored]:
    ids, mask = padded([text.tokens[:max_length] for text in texts], target.device)
    taps, _ = target.states(ids, mask, drafter.taps)
    steps = list(drafter.unroll(UnrollBatch(input_ids=ids, attention_mask=mask, taps=taps, num_steps=max_depth)))
    positions = [
        position
        for row, text in enumerate(texts)
        for position in positions_of(text, row, max_depth=max_depth, max_length=max_length)
        if is_drafted(steps, position)
    ]
    chunks = [positions[at : at + CHUNK] for at in range(0, len(positions), CHUNK)]
    alphas = torch.cat([torch.zeros(0), *[_alpha(drafter, steps, chunk, target.vocab_size) for chunk in chunks]])
    return [_gather(row, positions, alphas.numpy()) for row in range(len(texts))]


def padded(rows: Sequence[Sequence[int]], device: torch.device) -> tuple[torch.Tensor, torch.Tensor]:
    """Token ids and mask [B, L], padded on the right."""
    width = max(len(row) for row in rows)
    ids = torch.tensor([[*row, *[0] * (width - len(row))] for row in rows], device=device)
    mask = torch.tensor([[1] * len(row) + [0] * (width - len(row)) for row in rows], device=device)
    return ids, mask


def step_of(steps: Sequence[UnrolledStep], depth: int) -> UnrolledStep:
    """A language model's unroll has one step: it drafts alike at every depth."""
    return steps[min(depth, len(steps) - 1)]


def is_drafted(steps: Sequence[UnrolledStep], position: Position) -> bool:
    step = step_of(steps, position.logged.depth)
    column = position.absolute - step.offset
    return column >= 0 and bool(step.valid[position.row, column])


def _alpha(drafter: Unrollable, steps: Sequence[UnrolledStep], positions: Sequence[Position], vocab_size: int) -> torch.Tensor:
    """[n] on the CPU; NaN where the draft's state is not finite."""
    chosen = [step_of(steps, position.logged.depth) for position in positions]
    hidden = torch.stack([step.hidden[one.row, one.absolute - step.offset] for step, one in zip(chosen, positions, strict=True)])
    logits = full_vocabulary(hidden @ drafter.head_weight().T, drafter.vocab_map, vocab_size)
    logged = [position.logged for position in positions]
    q_logits = process(logits, sampling_rows(logged, logits.device)).cpu()
    alpha = top_overlap(processed_law(logged), q_logits).low
    is_finite = torch.isfinite(logits).any(-1) & ~torch.isnan(logits).any(-1)
    return torch.where(is_finite.cpu(), alpha, math.nan)


def full_vocabulary(logits: torch.Tensor, vocab_map: torch.Tensor | None, vocab_size: int) -> torch.Tensor:
    """Draft logits [n, Vd] -> [n, V], tokens that the draft does not know at -inf."""
    spread = torch.full((logits.shape[0], vocab_size), -math.inf, device=logits.device)
    if vocab_map is None:
        shared = min(vocab_size, logits.shape[1])
        spread[:, :shared] = logits[:, :shared]
        return spread
    return spread.index_copy_(1, vocab_map.to(logits.device), logits.float())


def _gather(row: int, positions: Sequence[Position], alphas: np.ndarray) -> Scored:
    mine = [index for index, position in enumerate(positions) if position.row == row]
    logged = [positions[index].logged for index in mine]
    kept = np.array([one.depth < one.record.accepted for one in logged], dtype=np.float64)
    return Scored(alphas[mine].astype(np.float64), kept, [one.record.draft_version for one in logged])
