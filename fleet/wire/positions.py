"""Logged distributions of the drafted positions of one step, from raw logits or from what an
accelerator has left of them.

Legend: n positions, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
import torch

from draftsmith.fleet.wire.messages import StepMeta, WireMessage
from draftsmith.kernels.sampling.logged import LoggedLogits, one_hot
from draftsmith.record import Distributions, ProbArrays


@dataclass(frozen=True)
class LoggedPositions:
    """Drafted tokens of one request in a step, with p and q at each."""

    drafted: list[int]
    p: Distributions
    q: Distributions
    draft_version: str
    weight_version: str


def rounds_of(
    message: WireMessage, temperatures: Mapping[int, float]
) -> dict[int, LoggedPositions]:
    """Rounds by handle, free of the ring's memory."""
    meta: StepMeta = message.meta(StepMeta)
    handles, counts, drafted = (array.tolist() for array in message.arrays[1:4])
    values = message.arrays[4:]
    if meta.dtype:
        spread = [temperatures.get(h, 1.0) for h, n in zip(handles, counts) for _ in range(n)]
        p, q = _from_raw(values, meta, spread, drafted)
    else:
        p, q = _from_reduced(values, drafted)
    rounds, begin = {}, 0
    # One function for all, by which a table sees that they are parts of the same arrays.
    sources = (lambda: p), (lambda: q)
    for handle, count in zip(handles, counts):
        end = begin + count
        rounds[handle] = LoggedPositions(
            drafted[begin:end],
            Distributions(sources[0], begin, end),
            Distributions(sources[1], begin, end),
            meta.draft_version,
            meta.weight_version,
        )
        begin = end
    return rounds


def _from_raw(
    values: list[np.ndarray], meta: StepMeta, temperatures: list[float], drafted: list[int]
) -> tuple[ProbArrays, ProbArrays]:
    p_logits = torch.from_numpy(values[0]).view(getattr(torch, meta.dtype))
    p = LoggedLogits(p_logits, None, drafted, temperatures)()
    if not values[1].size:
        return p, one_hot(drafted)
    q_values = torch.from_numpy(values[1]).float()
    q_logits = q_values.log() if meta.q_is_probs else q_values
    return p, LoggedLogits(q_logits, None, drafted)()


def _from_reduced(values: list[np.ndarray], drafted: list[int]) -> tuple[ProbArrays, ProbArrays]:
    p = _joined(*values[:3])
    return p, _joined(*values[3:6]) if len(values) > 3 else one_hot(drafted)


def _joined(ids: np.ndarray, logprobs: np.ndarray, rest: np.ndarray) -> ProbArrays:
    tail, log_norms, of_drafted = rest.T.copy()
    return ProbArrays(ids.copy(), logprobs.copy(), tail, log_norms, of_drafted)
