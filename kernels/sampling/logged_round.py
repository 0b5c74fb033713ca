"""Logits of an engine's round, for records: reduced where a reader asks, or copied as they are.

Legend: B drafting rows, K most tokens drafted in a row, R rows of target logits, n positions, V
vocabulary.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Sequence
from itertools import accumulate
from typing import NamedTuple

import torch

from draftsmith.kernels.dispatch import pins, sent_tensor
from draftsmith.kernels.sampling.logged import late_arrays, prob_arrays
from draftsmith.record import ProbArrays, RoundRow

# Dtypes of logits that are copied as they are.
COPIED = (torch.float32, torch.bfloat16, torch.float16)


class _Logged(NamedTuple):
    logits: torch.Tensor  # [n, V]
    tokens: list[int]  # [n] drafted there
    temperatures: list[float] | None = None  # [n] of p; None for q, which has no norms


class Copy(NamedTuple):
    """Logits [n, V] that can be copied as they are: runs of neighbouring rows of a table. Without
    an operation of torch or an array of numpy: each takes as long as copying some rows."""

    table: torch.Tensor  # [*, V], contiguous
    runs: list[tuple[int, int]]  # begin and end of each
    num_rows: int  # n
    size: int  # V
    row_bytes: int

    @property
    def nbytes(self) -> int:
        return self.num_rows * self.row_bytes

    def into(self, address: int) -> None:
        """Copies them to memory of `nbytes` at `address`."""
        source, row_bytes = self.table.data_ptr(), self.row_bytes
        for begin, end in self.runs:
            nbytes = (end - begin) * row_bytes
            ctypes.memmove(address, source + begin * row_bytes, nbytes)
            address += nbytes


class LoggedRound:
    """p and q at the drafted positions of one round, in the engine's memory. Nothing is made of
    them until a sink asks.

    Args:
        p: [R, V] unprocessed target logits; drafting row b owns `len(chains[b]) + 1` consecutive
            ones.
        q: [B, K, V] processed draft logits; None where the draft is sure of its tokens.
        chains: drafted tokens of each drafting row.
    """

    def __init__(self, p: torch.Tensor, q: torch.Tensor | None, chains: Sequence[Sequence[int]]):
        self.p, self.q, self.chains = p, q, chains
        self._late: tuple[Callable[[], ProbArrays], Callable[[], ProbArrays] | None] | None = None

    @property
    def is_late(self) -> bool:
        """True where p and q are reduced on a device, and better asked for a round later."""
        return self._late is not None or pins(self.p.device)

    def begin(self, rows: Sequence[RoundRow]) -> None:
        """Reduce p and q of `rows`, the only ones that will be asked for, on their device. The
        memory of many rounds' logits would be the models'."""
        if self._late is not None:
            return
        p, q = self._parts(rows)
        self._late = late_arrays(*p), None if q is None else late_arrays(*q)
        self.p, self.q = self.p[:0], None

    def arrays(self, rows: Sequence[RoundRow]) -> tuple[ProbArrays, ProbArrays | None]:
        """p and q at the drafted positions of `rows`; no q where it is one-hot."""
        if self._late is not None:
            p, q = self._late
            return p(), None if q is None else q()
        of_p, of_q = self._parts(rows)
        return prob_arrays(*of_p), None if of_q is None else prob_arrays(*of_q)

    def _parts(self, rows: Sequence[RoundRow]) -> tuple[_Logged, _Logged | None]:
        tokens = [token for row in rows for token in row.drafted]
        spread = [row.head.temperature for row in rows for _ in row.drafted]
        p = _Logged(_taken(self.p, self._p_runs(rows)), tokens, spread)
        if self.q is None:
            return p, None
        flat = self.q.flatten(0, 1)
        return p, _Logged(_taken(flat, self._q_runs(rows, self.q)), tokens)

    def copies(self, rows: Sequence[RoundRow]) -> tuple[Copy, Copy | None] | None:
        """p and q of `rows` to copy, q None where it is one-hot; None for what is better reduced
        where it is: on an accelerator, or in another dtype."""
        p, q = self.p, self.q
        if not _can_copy(p) or not (q is None or _can_copy(q)):
            return None
        copied = _copy(p, self._p_runs(rows))
        return copied, None if q is None else _copy(q, self._q_runs(rows, q))

    def _p_runs(self, rows: Sequence[RoundRow]) -> list[tuple[int, int]]:
        firsts = [0, *accumulate([len(chain) + 1 for chain in self.chains])]
        return [(first := firsts[row.place], first + len(row.drafted)) for row in rows]

    def _q_runs(self, rows: Sequence[RoundRow], q: torch.Tensor) -> list[tuple[int, int]]:
        depth = q.size(1)
        return _joined([(at := row.place * depth, at + len(row.drafted)) for row in rows])


def _can_copy(logits: torch.Tensor) -> bool:
    return logits.is_cpu and logits.dtype in COPIED


def _copy(logits: torch.Tensor, runs: list[tuple[int, int]]) -> Copy:
    size = logits.size(-1)
    count = sum([end - begin for begin, end in runs])
    return Copy(logits.contiguous(), runs, count, size, size * logits.element_size())


def _joined(runs: list[tuple[int, int]]) -> list[tuple[int, int]]:
    """The same with neighbours as one."""
    joined = runs[:1]
    for run in runs[1:]:
        if joined[-1][1] == run[0]:
            joined[-1] = (joined[-1][0], run[1])
        else:
            joined.append(run)
    return joined


def _taken(table: torch.Tensor, runs: list[tuple[int, int]]) -> torch.Tensor:
    """[n, V] the rows of `runs`."""
    rows = torch.tensor([index for begin, end in runs for index in range(begin, end)])
    return table[sent_tensor(table.device, rows)]
