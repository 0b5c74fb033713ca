"""Distributions as records hold them: the likeliest tokens, the drafted token's own logprob and the
norm under the request's temperature. n positions, V vocabulary."""

from __future__ import annotations

import threading
from collections.abc import Sequence

import numpy as np
import torch

from draftsmith.config import TOP
from draftsmith.kernels.dispatch import Reading, sent, sent_tensor
from draftsmith.kernels.sampling import logged_compiled
from draftsmith.kernels.sampling.top_tokens import top_probs
from draftsmith.record import ProbArrays


def prob_arrays(logits: torch.Tensor, log_norms: np.ndarray, tokens: Sequence[int]) -> ProbArrays:
    """Arrays of logits [n, V] with the logprobs of the drafted `tokens`."""
    ids, logprobs, tail, drafted = (part.cpu().numpy() for part in _parts(logits, tokens))
    return ProbArrays(ids, logprobs, tail, log_norms, drafted)


def _parts(logits: torch.Tensor, tokens: Sequence[int]) -> tuple[torch.Tensor, ...]:
    """ids [n, k] int32, logprobs [n, k], tail [n] and the drafted tokens' logprobs [n] float32."""
    distribution = top_probs(logits, TOP)
    chosen = sent(logits.device, tokens)[0].clamp(min=0)[:, None]
    # Apart from the likeliest token by as much as their logits, without a second logsumexp.
    gap = logits.gather(-1, chosen).float() - logits.gather(-1, distribution.ids[:, :1]).float()
    drafted = distribution.logprobs[:, 0] + gap[:, 0]
    ids, logprobs, tail = distribution
    return ids.int(), logprobs.float(), tail.float(), drafted.float()


class _Packed:
    """Arrays made on a device, on their way to the host as one tensor [n, 2 k + 3]."""

    def __init__(
        self, logits: torch.Tensor, tokens: Sequence[int], temperatures: Sequence[float] | None
    ):
        ids, logprobs, tail, drafted = _parts(logits, tokens)
        norms = torch.zeros_like(tail)
        if temperatures is not None and not all(one in (0.0, 1.0) for one in temperatures):
            norms = _log_norms(logits, temperatures)
        columns = torch.stack([tail, norms, drafted], dim=1)
        # The bits of the ids, as they are.
        self._reading = Reading(torch.cat([ids.view(torch.float32), logprobs, columns], dim=1))

    def arrays(self) -> ProbArrays:
        values = self._reading.wait().numpy()
        k = (values.shape[1] - 3) // 2
        ids = np.ascontiguousarray(values[:, :k]).view(np.int32)
        return ProbArrays(ids, values[:, k : 2 * k], *values[:, 2 * k :].T)


def log_norms_of(logits: torch.Tensor, temperatures: Sequence[float]) -> np.ndarray:
    """[n] log sum_v exp(logprob_v / temperature), 0 where the temperature is 0 or 1."""
    if all(temperature in (0.0, 1.0) for temperature in temperatures):
        return np.zeros(len(temperatures), dtype=np.float32)
    return _log_norms(logits, temperatures).cpu().numpy()


def _log_norms(logits: torch.Tensor, temperatures: Sequence[float]) -> torch.Tensor:
    """[n]; of a temperature of 0 at temperature 1, which gives 0 up to rounding."""
    host = torch.tensor([one or 1.0 for one in temperatures], dtype=torch.float32)
    scale = sent_tensor(logits.device, host)[:, None]
    return torch.logsumexp(torch.log_softmax(logits.float(), dim=-1) / scale, dim=-1)


def one_hot(tokens: Sequence[int]) -> ProbArrays:
    """Arrays of the distribution of a draft that is sure of its tokens [n]."""
    ids = np.array(tokens, dtype=np.int32)[:, None]
    none = np.zeros(len(tokens), dtype=np.float32)
    return ProbArrays(ids, np.zeros(ids.shape, dtype=np.float32), none, none, none)


class OneHot:
    """Source of q where a draft is sure of its tokens [n]."""

    def __init__(self, tokens: Sequence[int]):
        self.tokens = tokens

    def __call__(self) -> ProbArrays:
        return one_hot(self.tokens)


class LoggedLogits:
    """Arrays of n positions that are made of their logits by the first call, on any thread; the
    logits are gone after it.

    Args:
        table: [R, V] logits, in memory that stays as it is until `keep` at least.
        rows: [n] of the positions in it; None for all of it, which stays as it is.
        tokens: [n] drafted there.
        temperatures: [n] of p; None for q, which has no norms.
    """

    def __init__(
        self,
        table: torch.Tensor,
        rows: Sequence[int] | None,
        tokens: Sequence[int],
        temperatures: Sequence[float] | None = None,
    ):
        self._table: torch.Tensor | None = table
        self._rows = None if rows is None else torch.tensor(rows, dtype=torch.int64)
        self._tokens, self._temperatures = tokens, temperatures
        self._lock = threading.Lock()
        self._made: ProbArrays | None = None
        self._packed: _Packed | None = None

    @property
    def nbytes(self) -> int:
        table = self._table
        return 0 if table is None else len(self._tokens) * table.shape[-1] * table.element_size()

    def keep(self) -> None:
        """Copy the logits, whose memory will be used again."""
        if self._rows is None:
            return
        with self._lock:
            if self._table is not None and self._rows is not None:
                rows = sent_tensor(self._table.device, self._rows)
                self._table, self._rows = self._table[rows], None

    def begin(self) -> None:
        """Make the arrays on the device of the logits, which are gone then, and let them come to
        the host. They are there when the first call needs them, if a round lies between."""
        self.keep()
        with self._lock:
            if self._table is not None:
                self._packed = _Packed(self._table, self._tokens, self._temperatures)
                self._table = None

    def __call__(self) -> ProbArrays:
        self.keep()
        with self._lock:
            if self._made is None and self._packed is not None:
                self._made, self._packed = self._packed.arrays(), None
            if self._made is None:
                assert self._table is not None
                self._made = self._arrays(self._table)
                self._table = None
            return self._made

    def _arrays(self, logits: torch.Tensor) -> ProbArrays:
        made = logged_compiled.prob_arrays(logits, self._tokens, self._temperatures, TOP)
        if made is not None:
            return made
        norms = np.zeros(len(self._tokens), dtype=np.float32)
        if self._temperatures is not None:
            norms = log_norms_of(logits, self._temperatures)
        return prob_arrays(logits, norms, self._tokens)
