"""What records say about the target: the sampling of each drafted position, and whether the logged p is this target's."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

import torch

from draftsmith.kernels.filters import SamplingRows
from draftsmith.serve.record import RoundRecord


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
    """[n] total variation, on the logged tokens, between the logged p and the law of raw `target_logits` [n, V]."""
    laws = [one.record.p[one.depth] for one in logged]
    width = max(len(law.ids) for law in laws)
    ids = torch.tensor([law.ids + [0] * (width - len(law.ids)) for law in laws], device=target_logits.device)
    padding = [[-math.inf] * (width - len(law.ids)) for law in laws]
    logprobs = torch.tensor([law.logprobs + rest for law, rest in zip(laws, padding, strict=True)], device=target_logits.device)
    if int(ids.max()) >= target_logits.shape[-1]:
        return torch.ones(len(laws))
    ours = target_logits.float().log_softmax(-1).gather(-1, ids).exp()
    difference = torch.where(logprobs == -math.inf, 0.0, (ours - logprobs.exp()).abs())
    return difference.sum(-1).cpu() / 2
