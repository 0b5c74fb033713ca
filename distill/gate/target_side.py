"""Target's share in the scores of a batch of texts, the same for every draft."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch

from draftsmith.distill.buffer.known_taps import known_taps, num_readable, padded_taps
from draftsmith.distill.buffer.traffic import ServedText
from draftsmith.distill.gate.logged import (
    SampledTop,
    disagreement,
    draft_rows,
    logged_arrays,
    sampled_top,
    sampling_rows,
)
from draftsmith.distill.gate.positions import Position
from draftsmith.drafters.interface import UnrollBatch
from draftsmith.drafters.target.target import Target
from draftsmith.kernels.acceptance import probabilities
from draftsmith.kernels.sampling.filters import SamplingRows, process
from draftsmith.train.data.batches import mask_of, padded
from draftsmith.train.objective.outline import TargetOutline
from draftsmith.train.objective.teacher import StateReader


class TargetRows(NamedTuple):
    """Values that n positions of a batch are scored with."""

    sampled: SampledTop
    draft_sampling: SamplingRows
    p: torch.Tensor | None  # [n, V] probabilities as sampled; None with an outline alone
    disagreement: torch.Tensor  # [n] on the CPU


@dataclass(frozen=True)
class TargetSide:
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
        p, distance = None, torch.zeros(len(logged))
        if self.hidden is not None:
            rows = [position.row for position in positions]
            before = [position.absolute - 1 for position in positions]
            logits = self.target.head(self.hidden[rows, before])
            distance = disagreement(known, logits)
            p = probabilities(process(logits, sampling_rows(logged, device)))
        return TargetRows(
            sampled_top(logged, known, device),
            draft_rows(logged, device),
            p,
            distance,
        )
