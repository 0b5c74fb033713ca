"""What records say about the target: the sampling of each drafted position, and whether the logged p is this target's."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import torch

from draftsmith.kernels.sampling.filters import SamplingRows
from draftsmith.record import Laws, RoundRecord


class Logged(NamedTuple):
    """One drafted position of a record."""

    record: RoundRecord
    depth: int


def sampling_rows(logged: Sequence[Logged], device: torch.device | str = "cpu") -> SamplingRows:
    records = [one.record for one in logged]
    return SamplingRows.of(
        [record.temperature for record in records],
        top_k=[record.top_k for record in records],
        top_p=[record.top_p for record in records],
        min_p=[record.min_p for record in records],
        device=device,
    )


def disagreement(logged: Sequence[Logged], target_logits: torch.Tensor) -> torch.Tensor:
    """[n] total variation, on the logged tokens, between the logged p and the law of raw `target_logits` [n, V]; 0 where a
    record tells of no law but that it was this one."""
    told = [Laws.of(one.record.p)[one.depth : one.depth + 1].arrays for one in logged]
    width = max(law.ids.shape[1] for law in told)
    if width == 0:
        return torch.zeros(len(told))
    ids = torch.from_numpy(np.concatenate([_widened(law.ids, width, 0) for law in told])).to(target_logits.device).long()
    padded = np.concatenate([_widened(law.logprobs, width, -np.inf) for law in told])
    logprobs = torch.from_numpy(padded).to(target_logits.device)
    if int(ids.max()) >= target_logits.shape[-1]:
        return torch.ones(len(told))
    ours = target_logits.float().log_softmax(-1).gather(-1, ids).exp()
    difference = torch.where(logprobs == -torch.inf, 0.0, (ours - logprobs.exp()).abs())
    return difference.sum(-1).cpu() / 2


def _widened(values: np.ndarray, width: int, filler: float) -> np.ndarray:
    return np.pad(values, ((0, 0), (0, width - values.shape[1])), constant_values=filler)
