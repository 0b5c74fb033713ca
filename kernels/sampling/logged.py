"""Distributions as records hold them: the likeliest tokens, the drafted token's own logprob and the
norm under a temperature; of an engine's round reduced where a reader asks, or copied as logits. On
a CPU a compiled kernel reads a row of logits three times, from a cache, and writes nothing of its
size; a row's result does not depend on the other rows.

Legend: n positions, V vocabulary; B drafting rows, K most tokens drafted in a row, R rows of target
logits.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Sequence
from itertools import accumulate
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch

from draftsmith.config import TOP
from draftsmith.kernels.dispatch import Reading, operation, pins, reads_freely, sent, sent_tensor
from draftsmith.kernels.host_compiler import compiled, function_of
from draftsmith.kernels.sampling.top_tokens import top_probs
from draftsmith.record import ProbArrays, RoundRow

# Dtypes of logits that are copied as they are.
COPIED = (torch.float32, torch.bfloat16, torch.float16)


@operation
def prob_arrays(
    logits: torch.Tensor, tokens: Sequence[int], temperatures: Sequence[float] | None = None
) -> ProbArrays:
    """Arrays of logits [n, V] with the logprobs of the drafted `tokens` and, for p, the norms under
    `temperatures`."""
    return _unpacked(_packed(logits, tokens, temperatures).cpu())


def late_arrays(
    logits: torch.Tensor,
    tokens: Sequence[int] | torch.Tensor,
    temperatures: Sequence[float] | None = None,
) -> Callable[[], ProbArrays]:
    """The same, made on the device of the logits. They are on the host when they are asked for, if
    a round lies between."""
    host = on_its_way(_packed(logits, tokens, temperatures))
    return lambda: _unpacked(host())


def on_its_way(tensor: torch.Tensor) -> Callable[[], torch.Tensor]:
    """A tensor's copy on the host, begun now and waited for when it is asked for."""
    return Reading(tensor).wait if pins(tensor.device) else lambda: tensor


def _packed(
    logits: torch.Tensor, tokens: Sequence[int] | torch.Tensor, temperatures: Sequence[float] | None
) -> torch.Tensor:
    """[n, 2 k + 3] float32: ids, whose bits stay as they are, logprobs, tail, norm, and the drafted
    token's logprob."""
    ids, logprobs, tail = top_probs(logits, TOP)
    known = tokens if isinstance(tokens, torch.Tensor) else sent(logits.device, tokens)[0]
    chosen = known.long().clamp(min=0)[:, None]
    # Apart from the likeliest token by as much as their logits, without a second logsumexp.
    gap = logits.gather(-1, chosen).float() - logits.gather(-1, ids[:, :1]).float()
    logprobs, tail = logprobs.float(), tail.float()
    norms = torch.zeros_like(tail)
    if temperatures is not None and not all(one in (0.0, 1.0) for one in temperatures):
        norms = _log_norms(logits, temperatures)
    rest = torch.stack([tail, norms, logprobs[:, 0] + gap[:, 0]], dim=1)
    return torch.cat([ids.int().view(torch.float32), logprobs, rest], dim=1)


def _unpacked(packed: torch.Tensor) -> ProbArrays:
    values = packed.numpy()
    k = (values.shape[1] - 3) // 2
    ids = np.ascontiguousarray(values[:, :k]).view(np.int32)
    return ProbArrays(ids, values[:, k : 2 * k], *values[:, 2 * k :].T)


def _log_norms(logits: torch.Tensor, temperatures: Sequence[float]) -> torch.Tensor:
    """[n] log sum_v exp(logprob_v / temperature); of a temperature of 0 at temperature 1, which
    gives 0 up to rounding."""
    host = torch.tensor([one or 1.0 for one in temperatures], dtype=torch.float32)
    scale = sent_tensor(logits.device, host)[:, None]
    return torch.logsumexp(torch.log_softmax(logits.float(), dim=-1) / scale, dim=-1)


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
    return reads_freely(logits.device) and logits.dtype in COPIED


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
    rows = torch.tensor(_indices(runs), dtype=torch.int64)
    return table[sent_tensor(table.device, rows)]


def _indices(runs: list[tuple[int, int]]) -> list[int]:
    return [index for begin, end in runs for index in range(begin, end)]


SOURCE = Path(__file__).with_name("logged_cpu.cpp")
MOST_KEPT = 128  # `kGroups` of the source


def _kernel(dtype: torch.dtype) -> Any:
    return function_of(SOURCE, "reduce", "pnppnnnpppi", dtype)


def prepare_arrays() -> None:
    """Compiles now, so that no round waits for it."""
    compiled(SOURCE)


def prob_arrays_compiled(
    logits: torch.Tensor, tokens: Sequence[int], temperatures: Sequence[float] | None = None
) -> ProbArrays | None:
    """Arrays of the `TOP` likeliest tokens of logits [n, V], with the logprobs of the
    drafted `tokens` (one that is not known counts as token 0) and, where a temperature is neither 0
    nor 1, the norm under it; None where no kernel can read them or keep that many.
    Raises `IndexError` for a token beyond the vocabulary."""
    kernel = _kernel(logits.dtype) if logits.stride(-1) == 1 else None
    if kernel is None:
        return None
    count, vocab_size = logits.shape
    kept = min(TOP, vocab_size)
    if kept > MOST_KEPT:
        return None
    drafted = np.maximum(np.asarray(tokens, dtype=np.int64), 0)
    if drafted.max(initial=0) >= vocab_size:
        raise IndexError(f"token {drafted.max()} is beyond a vocabulary of {vocab_size}")
    scales = None if temperatures is None else np.asarray(temperatures, dtype=np.float32)
    ids = np.empty((count, kept), dtype=np.int32)
    logprobs, rest = np.empty((count, kept), np.float32), np.empty((3, count), np.float32)
    kernel(
        logits.data_ptr(),
        logits.stride(0),
        drafted.ctypes.data,
        None if scales is None else scales.ctypes.data,
        count,
        vocab_size,
        kept,
        ids.ctypes.data,
        logprobs.ctypes.data,
        rest.ctypes.data,
        torch.get_num_threads(),
    )
    return ProbArrays(ids, logprobs, *rest)
