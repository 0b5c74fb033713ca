"""Chain verification of raw logits by a compiled kernel, for a CPU with a C++ compiler: filters,
tests, residuals and draws in one call, with `chain`'s tokens.

Legend as in `chain.py`.
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from functools import cache
from typing import Any, NamedTuple

import torch

from draftsmith.kernels.host_compiler import compiled
from draftsmith.kernels.sampling.draw_compiled import ROWS, SOURCE, rows_of, takes
from draftsmith.kernels.sampling.filters import SamplingRows

_pointer, _number = ctypes.c_void_p, ctypes.c_int64
_ARGUMENTS: list[Any] = [
    *ROWS,
    *[_pointer] * 3,
    _number,
    _number,
    *[_pointer] * 4,
    _number,
    _number,
]
_ARGUMENTS += [ctypes.c_int]


class Drafts(NamedTuple):
    """Drafted tokens of the first D of B rows."""

    tokens: torch.Tensor  # [D, K] int64
    lengths: torch.Tensor  # [D] int64
    logits: torch.Tensor | None  # [D, K, V] processed; None where drafting was deterministic
    # [D] int64, >= lengths: rows of target logits that each row owns beside its first one; None:
    # its length
    rooms: torch.Tensor | None = None

    @property
    def room(self) -> torch.Tensor:
        return self.lengths if self.rooms is None else self.rooms


@cache
def _kernel() -> Any:
    library = compiled(SOURCE)
    if library is None:
        return None
    library.verify_chains.argtypes = _ARGUMENTS
    library.verify_chains.restype = ctypes.c_bool
    return library.verify_chains


def verify_chain_compiled(
    logits: torch.Tensor,
    rows: SamplingRows,
    drafts: Drafts | None,
    streams: Sequence[tuple[int, int]],
) -> list[list[int]] | None:
    """Accepted tokens of each row and the token after them.

    Args:
        logits: [R, V] raw target logits; row b owns 1 + the number of its drafts.
        rows: of the B requests.
        streams: seed and position of each; a row without drafts draws a bonus token.

    None where a rounding of torch's might decide, a row has no mass, and where there is no
    compiler.
    """
    kernel = _kernel() if takes(logits) else None
    if kernel is None:
        return None
    num_rows, num_tokens = len(streams), logits.shape[-1]
    tokens = lengths = q_logits = None
    if drafts is not None:
        tokens, lengths = drafts.tokens.contiguous(), drafts.lengths.contiguous()
        if drafts.logits is not None:
            if not takes(drafts.logits):
                return None
            q_logits = drafts.logits.contiguous()
    numbers = _number * num_rows
    seeds, positions = [numbers(*column) for column in zip(*streams)]
    accepted, emitted = numbers(), numbers()
    done = kernel(
        *rows_of(logits, rows),
        *[None if part is None else part.data_ptr() for part in (tokens, lengths, q_logits)],
        *((0, 0) if tokens is None else tokens.shape),
        seeds,
        positions,
        accepted,
        emitted,
        num_rows,
        num_tokens,
        torch.get_num_threads(),
    )
    if not done:
        return None
    if tokens is None:
        return [[token] for token in emitted]
    kept = tokens.tolist()
    kept += [[]] * (num_rows - len(kept))
    return [
        [*row[:count], token] for row, count, token in zip(kept, accepted, emitted, strict=True)
    ]
