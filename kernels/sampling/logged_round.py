"""Logits of an engine's round, for records: reduced where a reader asks, or copied as they are.

Legend: B drafting rows, K most tokens drafted in a row, R rows of target logits, n positions, V
vocabulary.
"""

from __future__ import annotations

import ctypes
import weakref
from collections.abc import Callable, Sequence
from itertools import accumulate
from typing import NamedTuple

import torch

from draftsmith.kernels.dispatch import pins
from draftsmith.kernels.sampling.logged import LoggedLogits, OneHot
from draftsmith.record import ProbArrays, RoundRow

# Dtypes of logits that are copied as they are.
COPIED = (torch.float32, torch.bfloat16, torch.float16)


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
    them until a sink asks, which on a CPU may be on its own thread: what it keeps then is copied by
    `keep` at the round's end.

    Args:
        p: [R, V] unprocessed target logits; drafting row b owns `len(chains[b]) + 1` consecutive
            ones.
        q: [B, K, V] processed draft logits; None where the draft is sure of its tokens.
        chains: drafted tokens of each drafting row.
    """

    def __init__(self, p: torch.Tensor, q: torch.Tensor | None, chains: Sequence[Sequence[int]]):
        self.p, self.q, self.chains = p, q, chains
        self._made: list[weakref.ref[LoggedLogits]] = []
        self._begun: tuple[Callable[[], ProbArrays], Callable[[], ProbArrays]] | None = None

    @property
    def is_late(self) -> bool:
        """True where p and q are reduced on a device, and better asked for a round later."""
        return self._begun is not None or pins(self.p.device)

    def begin(self, rows: Sequence[RoundRow]) -> None:
        """Reduce p and q of `rows`, the only ones that will be asked for, on their device. The
        memory of many rounds' logits would be the models'."""
        self._begun = self.sources(rows)
        for source in self._begun:
            if isinstance(source, LoggedLogits):
                source.begin()
        self.p, self.q = self.p[:0], None

    def sources(
        self, rows: Sequence[RoundRow]
    ) -> tuple[Callable[[], ProbArrays], Callable[[], ProbArrays]]:
        """Sources of p and of q at the drafted positions of `rows`."""
        if self._begun is not None:
            return self._begun
        tokens = [token for row in rows for token in row.drafted]
        spread = [row.head.temperature for row in rows for _ in row.drafted]
        p = self._kept(LoggedLogits(self.p, _indices(self._p_runs(rows)), tokens, spread))
        if self.q is None:
            return p, OneHot(tokens)
        flat = self.q.flatten(0, 1)
        return p, self._kept(LoggedLogits(flat, _indices(self._q_runs(rows, self.q)), tokens))

    def copies(self, rows: Sequence[RoundRow]) -> tuple[Copy, Copy | None] | None:
        """p and q of `rows` to copy, q None where it is one-hot; None for what is better reduced
        where it is: on an accelerator, or in another dtype."""
        p, q = self.p, self.q
        if not _can_copy(p) or not (q is None or _can_copy(q)):
            return None
        copied = _copy(p, self._p_runs(rows))
        return copied, None if q is None else _copy(q, self._q_runs(rows, q))

    def kept(self) -> list[LoggedLogits]:
        """Those made of this round that someone keeps."""
        return [one for reference in self._made if (one := reference()) is not None]

    def _kept(self, made: LoggedLogits) -> LoggedLogits:
        self._made.append(weakref.ref(made))
        return made

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


def _indices(runs: list[tuple[int, int]]) -> list[int]:
    return [index for begin, end in runs for index in range(begin, end)]
