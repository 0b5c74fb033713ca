"""Records of rounds that say only what a test is about, and their distributions one by one."""

from __future__ import annotations

import io
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch

from draftsmith.config import TOP
from draftsmith.distill.buffer import record_table
from draftsmith.distill.buffer.traffic import ServedText, stitch
from draftsmith.kernels.sampling.top_tokens import top_probs
from draftsmith.record import Distributions, ProbArrays, RoundRecord


@dataclass(slots=True)
class Distribution:
    """One of `ProbArrays`."""

    ids: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    tail: float = 1.0
    log_norm: float = 0.0
    drafted: float | None = None


def logged(*distributions: Distribution) -> Distributions:
    count, width = len(distributions), max((len(one.ids) for one in distributions), default=0)
    ids = np.zeros((count, width), dtype=np.int32)
    logprobs = np.full((count, width), -np.inf, dtype=np.float32)
    for row, one in enumerate(distributions):
        ids[row, : len(one.ids)], logprobs[row, : len(one.ids)] = one.ids, one.logprobs
    rest = [
        (one.tail, one.log_norm, np.nan if one.drafted is None else one.drafted)
        for one in distributions
    ]
    columns = np.array(rest, dtype=np.float32).reshape(count, 3).T
    return Distributions(ProbArrays(ids, logprobs, *columns), 0, count)


def of_logits(logits: torch.Tensor, k: int = TOP) -> Distributions:
    found = top_probs(logits, k)
    ids, logprobs, tail = found.ids.int().numpy(), found.logprobs.float(), found.tail.float()
    arrays = ProbArrays(ids, logprobs.numpy(), tail.numpy(), np.zeros(len(ids), np.float32))
    return Distributions(arrays, 0, len(ids))


def each(distributions: Distributions) -> list[Distribution]:
    arrays, found = distributions.arrays, []
    for row, drafted in enumerate(arrays.drafted_or_nan.tolist()):
        kept = int(np.isfinite(arrays.logprobs[row]).sum())
        ids, logprobs = (values[row, :kept].tolist() for values in arrays[:2])
        tail, norm = float(arrays.tail[row]), float(arrays.log_norms[row])
        found.append(
            Distribution(ids, logprobs, tail, norm, None if drafted != drafted else drafted)
        )
    return found


def round_record(**changes: Any) -> RoundRecord:
    """The first round of a request, behind one token and without drafts; `emitted` is the last
    committed token."""
    committed = changes.get("committed", [])
    values: dict[str, Any] = {
        "request": "r", "round": 0, "request_class": "", "target": "t", "target_revision": "",
        "draft_version": "1", "time_s": 0.0, "temperature": 1.0, "top_k": 0, "top_p": 1.0,
        "min_p": 0.0, "position": 1, "context": [1], "drafted": [], "accepted": 0,
        "committed": committed, "emitted": committed[-1] if committed else -1,
    }  # fmt: skip
    return RoundRecord(**{**values, **changes})


def served_text(records: Iterable[RoundRecord]) -> ServedText:
    text = stitch(records)
    assert text is not None
    return text


def file_of(records: Sequence[RoundRecord]) -> bytes:
    """Bytes of a Parquet file."""
    data = io.BytesIO()
    record_table.write(record_table.to_table(records), data)
    return data.getvalue()
