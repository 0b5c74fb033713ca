"""The target's law as a record logged it (unfiltered, temperature 1, 64 likeliest tokens) under the request's own sampling.

N rows, K listed tokens. Whatever the sampling leaves of the unlisted mass stays in `tail`, so that overlaps remain bounds.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

import torch

from draftsmith.kernels.filters import SamplingRows
from draftsmith.kernels.laws import TopLaw
from draftsmith.serve.record import Law, RoundRecord


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


def processed_law(logged: Sequence[Logged]) -> TopLaw:
    """p as verification used it, as far as 64 tokens tell."""
    law = _padded([one.record.p[one.depth] for one in logged])
    log_norm = torch.tensor([one.record.p_log_norm[one.depth] for one in logged])
    rows = sampling_rows(logged)
    greedy = rows.temperature == 0
    logprobs = law.logprobs / torch.where(greedy, 1.0, rows.temperature)[:, None] - log_norm[:, None]
    logprobs = keep_top_k(logprobs, torch.where(greedy, 1, rows.top_k))
    logprobs = keep_top_p(logprobs, rows.top_p)
    logprobs = keep_min_p(logprobs, rows.min_p)
    return TopLaw(law.ids, logprobs, (1 - logprobs.exp().sum(-1)).clamp(min=0))


def _padded(laws: Sequence[Law]) -> TopLaw:
    """[N, K] with logprob -inf behind a short list; likeliest first, as logged."""
    width = max((len(law.ids) for law in laws), default=0)
    ids = torch.tensor([law.ids + [0] * (width - len(law.ids)) for law in laws], dtype=torch.int64)
    logprobs = torch.tensor([law.logprobs + [-math.inf] * (width - len(law.logprobs)) for law in laws])
    return TopLaw(ids, logprobs, torch.tensor([law.tail for law in laws]))


def keep_top_k(logprobs: torch.Tensor, top_k: torch.Tensor) -> torch.Tensor:
    """Exact for top_k up to K; a wider filter keeps what is listed and the tail."""
    width = logprobs.shape[-1]
    is_known = (top_k > 0) & (top_k <= width)
    least = logprobs.gather(-1, (top_k.clamp(1, width) - 1)[:, None])
    return _kept(logprobs, logprobs >= least, is_known)


def keep_top_p(logprobs: torch.Tensor, top_p: torch.Tensor) -> torch.Tensor:
    """Exact where the listed tokens reach `top_p`; otherwise nothing is cut."""
    probs = logprobs.exp()
    before = probs.cumsum(-1) - probs
    return _kept(logprobs, before < top_p.to(probs.dtype)[:, None], (top_p < 1) & (probs.sum(-1) >= top_p))


def keep_min_p(logprobs: torch.Tensor, min_p: torch.Tensor) -> torch.Tensor:
    """Exact where the least likely listed token falls, and with it all unlisted ones; otherwise nothing is cut."""
    probs = logprobs.exp()
    keep = probs >= min_p[:, None] * probs[:, :1]
    return _kept(logprobs, keep, (min_p > 0) & ~keep[:, -1])


def _kept(logprobs: torch.Tensor, keep: torch.Tensor, rows: torch.Tensor) -> torch.Tensor:
    """Filters `rows` and gives what is left the whole mass; other rows stay as they are."""
    filtered = logprobs.masked_fill(~keep, -math.inf).log_softmax(-1)
    return torch.where(rows[:, None], filtered, logprobs)
