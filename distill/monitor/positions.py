"""Verified positions of records as arrays: what was drafted, what became of it, and p and q as far
as they are logged.

Legend: n positions, w and u logged tokens of p and q.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch

from draftsmith.distill.buffer.record_table import STEPS
from draftsmith.distill.gate.logged import filtered
from draftsmith.record import Distributions, ProbArrays, RoundRecord

# Logged logprobs closer than this may be equal ones: half a step of rounding each.
TIE = 1.5 / STEPS
# Relative error of a rounded probability, with that of the mass it is divided by.
ROUNDING = 1 / STEPS
# The same of float32 logits, exactly logged.
ARITHMETIC = 1e-4
# A tail below it is none.
NO_TAIL = 1e-6


@dataclass(frozen=True)
class Positions:
    """Drafted positions that verification reached: the accepted ones of each round and the first
    rejected one."""

    record: np.ndarray  # [n] index of its record
    depth: np.ndarray  # [n] from 0, within its round
    drafted: np.ndarray  # [n] token x
    accepted: np.ndarray  # [n] bool
    token: np.ndarray  # [n] what stands there: x, or what replaced it; -1 for none
    greedy: np.ndarray  # [n] bool, of a request at temperature 0
    p_ids: np.ndarray  # [n, w]
    p: np.ndarray  # [n, w] float64, as sampled: temperature and filters applied
    p_drafted: np.ndarray  # [n] p(x), NaN where it is not known
    p_error: np.ndarray  # [n] largest relative error of `p`
    p_known: np.ndarray  # [n] bool: `p` is what verification had, up to `p_error`
    p_tail: np.ndarray  # [n] probability outside `p_ids`
    exact: np.ndarray  # [n] bool: p(x) and q(x) are logged unrounded
    q_ids: np.ndarray  # [n, u]
    q: np.ndarray  # [n, u] float64
    q_drafted: np.ndarray  # [n] q(x), NaN where it is not known
    q_tail: np.ndarray  # [n]

    def __len__(self) -> int:
        return len(self.record)


def positions_of(records: Sequence[RoundRecord]) -> Positions | None:
    """Positions of records that hold p and q; None where there is none."""
    kept = [(index, one) for index, one in enumerate(records) if _is_logged(one)]
    if not kept:
        return None
    counts = [len(one.drafted) for _, one in kept]
    reached = [max(0, min(one.accepted + 1, len(one.drafted))) for _, one in kept]
    depth = np.concatenate([np.arange(count) for count in counts])
    chosen = depth < np.repeat(reached, counts)
    p, q = (
        ProbArrays.joined(Distributions.runs(rows)).chosen(chosen)
        for rows in ([one.p for _, one in kept], [one.q for _, one in kept])
    )
    depth = depth[chosen]
    owner = np.repeat(np.arange(len(kept)), reached)
    drafted = np.array([token for (_, one), n in zip(kept, reached) for token in one.drafted[:n]])
    accepted = depth < np.array([one.accepted for _, one in kept])[owner]
    emitted = np.array([one.emitted for _, one in kept])[owner]
    sampled = _Sampled.of([one for _, one in kept], owner, p)
    return Positions(
        record=np.array([index for index, _ in kept])[owner],
        depth=depth,
        drafted=drafted,
        accepted=accepted,
        token=np.where(accepted, drafted, emitted),
        greedy=sampled.temperature == 0,
        p_ids=p.ids,
        p=sampled.probs,
        p_drafted=sampled.of_drafted(drafted, p),
        p_error=sampled.error,
        p_known=sampled.is_known,
        p_tail=sampled.tail,
        exact=~sampled.is_cut & ~np.isnan(p.drafted_or_nan) & ~np.isnan(q.drafted_or_nan),
        q_ids=q.ids,
        q=np.exp(q.logprobs.astype(np.float64)),
        q_drafted=_found(drafted, q, np.exp(q.logprobs.astype(np.float64))),
        q_tail=q.tail.astype(np.float64),
    )


def _is_logged(record: RoundRecord) -> bool:
    drafts = len(record.drafted)
    if drafts == 0 or not len(record.p) == drafts == len(record.q):
        return False
    return record.p.is_logged and record.q.is_logged


def _found(tokens: np.ndarray, logged: ProbArrays, probs: np.ndarray) -> np.ndarray:
    """[n] probabilities of `tokens`: the unrounded ones, else those among the logged tokens; NaN
    where neither is there."""
    place = (logged.ids == tokens[:, None]) & np.isfinite(logged.logprobs)
    listed = np.where(place.any(axis=1), (probs * place).sum(axis=1), np.nan)
    given = np.exp(logged.drafted_or_nan.astype(np.float64))
    return np.where(np.isnan(given), listed, given)


@dataclass(frozen=True)
class _Sampled:
    """Logged p under the sampling of its requests."""

    temperature: np.ndarray  # [n]
    probs: np.ndarray  # [n, w]
    tail: np.ndarray  # [n]
    is_cut: np.ndarray  # [n] bool: a filter ends the support among the logged tokens
    is_known: np.ndarray  # [n] bool
    error: np.ndarray  # [n]

    @classmethod
    def of(cls, records: Sequence[RoundRecord], owner: np.ndarray, p: ProbArrays) -> _Sampled:
        """p is not known where a filter may cut outside the logged tokens, or where rounding
        decides which tokens it keeps; both are conditions on p alone."""
        temperature, top_k, top_p, min_p = (
            np.array([getattr(one, name) for one in records], dtype=np.float64)[owner]
            for name in ("temperature", "top_k", "top_p", "min_p")
        )
        greedy = temperature == 0
        logprobs = p.logprobs.astype(np.float64)
        scale = np.where(greedy, 1.0, temperature)[:, None]
        probs = np.exp(logprobs / scale - p.log_norms.astype(np.float64)[:, None])
        # Of temperature 1 the tail is logged, free of the others' rounding.
        tail = np.where(temperature == 1, p.tail, np.clip(1 - probs.sum(axis=1), 0, 1))
        width = probs.shape[1]
        active = ~greedy & ((top_k > 0) | (top_p < 1) | (min_p > 0))
        if not active.any():
            return cls._unfiltered(temperature, probs, tail, logprobs)
        settings = (
            np.where((top_k > 0) & active, np.minimum(top_k, width), width),
            np.where((top_p < 1) & active, top_p, math.inf),
            np.where(active, min_p, 0.0),
        )
        cut, rest = _filtered(probs, tail, *settings)
        margin = 4 * ROUNDING / np.minimum(1.0, scale[:, 0])
        top_k, top_p, min_p = settings
        looser, _ = _filtered(probs, tail, top_k, top_p * (1 + margin), min_p * (1 - margin))
        tighter, _ = _filtered(probs, tail, top_k, top_p * (1 - margin), min_p * (1 + margin))
        sizes = (cut > 0).sum(axis=1)
        is_cut = active & (sizes < (probs > 0).sum(axis=1))
        is_settled = (sizes == (looser > 0).sum(axis=1)) & (sizes == (tighter > 0).sum(axis=1))
        last = np.take_along_axis(logprobs, np.maximum(sizes - 1, 0)[:, None], axis=1)[:, 0]
        following = np.take_along_axis(logprobs, np.minimum(sizes, width - 1)[:, None], axis=1)
        is_settled &= ~is_cut | (last - following[:, 0] > TIE)
        inside = ~active | is_cut | (tail < NO_TAIL)
        return cls(
            temperature=temperature,
            probs=cut,
            tail=np.where(is_cut, 0.0, rest),
            is_cut=is_cut,
            is_known=np.isfinite(logprobs[:, 0]) & is_settled & inside,
            error=ROUNDING / np.minimum(1.0, scale[:, 0]),
        )

    @classmethod
    def _unfiltered(
        cls, temperature: np.ndarray, probs: np.ndarray, tail: np.ndarray, logprobs: np.ndarray
    ) -> _Sampled:
        scale = np.where(temperature == 0, 1.0, temperature)
        return cls(
            temperature=temperature,
            probs=probs,
            tail=tail,
            is_cut=np.zeros(len(tail), dtype=bool),
            is_known=np.isfinite(logprobs[:, 0]),
            error=ROUNDING / np.minimum(1.0, scale),
        )

    def of_drafted(self, tokens: np.ndarray, p: ProbArrays) -> np.ndarray:
        """[n] p(x); NaN where it is not known, 0 where a filter cuts x."""
        scale = np.where(self.temperature == 0, 1.0, self.temperature)
        given = p._replace(drafted=p.drafted_or_nan / scale - p.log_norms)
        listed = _found(tokens, p._replace(drafted=None), self.probs)
        return np.where(
            self.is_cut, np.nan_to_num(listed, nan=0.0), _found(tokens, given, self.probs)
        )


def _filtered(probs: np.ndarray, tail: np.ndarray, *settings: np.ndarray) -> list[np.ndarray]:
    found = filtered(*map(torch.from_numpy, (probs, tail, *settings)))
    return [values.numpy() for values in found]
