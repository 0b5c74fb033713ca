"""Chain verification of raw logits by a compiled kernel, for a CPU with a C++ compiler: filters,
tests, residuals and draws in one call, with `chain`'s tokens.

Legend as in `chain_logits.py`.
"""

from __future__ import annotations

import ctypes
from functools import cache
from typing import Any

import torch

from draftsmith.kernels.host_compiler import compiled
from draftsmith.kernels.sampling.draw_compiled import ROWS, SOURCE, rows_of, takes
from draftsmith.kernels.sampling.filters import SamplingRows
from draftsmith.kernels.verify.verdict import Drafts

_pointer, _number = ctypes.c_void_p, ctypes.c_int64
_ARGUMENTS: list[Any] = [*ROWS, *[_pointer] * 4, *[_number] * 2, *[_pointer] * 3, *[_number] * 2]
_ARGUMENTS += [ctypes.c_int]


@cache
def _kernel() -> Any:
    library = compiled(SOURCE)
    if library is None:
        return None
    library.verify_chains.argtypes = _ARGUMENTS
    library.verify_chains.restype = ctypes.c_bool
    return library.verify_chains


def verify_logits_compiled(
    logits: torch.Tensor,
    rows: SamplingRows,
    drafts: Drafts | None,
    seeds: torch.Tensor,
    positions: torch.Tensor,
) -> torch.Tensor | None:
    """As `verify_logits`; None where a rounding of torch's might decide, a row has no mass, and
    where there is no compiler."""
    kernel = _kernel() if takes(logits) else None
    if kernel is None:
        return None
    num_drafting = num_draft = 0
    tokens = lengths = q_logits = sizes = None
    if drafts is not None:
        if not (drafts.logits is None or takes(drafts.logits)):
            return None
        given = [None if part is None else part.contiguous() for part in drafts]
        tokens, lengths, q_logits, sizes = [
            None if one is None else one.data_ptr() for one in given
        ]
        num_drafting, num_draft = drafts.tokens.shape
    num_rows = len(seeds)
    verdicts = torch.empty(num_rows, num_draft + 2, dtype=torch.int64)
    seeds, positions = seeds.contiguous(), positions.contiguous()
    done = kernel(
        *rows_of(logits, rows),
        tokens,
        lengths,
        sizes,
        q_logits,
        num_drafting,
        num_draft,
        seeds.data_ptr(),
        positions.data_ptr(),
        verdicts.data_ptr(),
        num_rows,
        logits.shape[-1],
        torch.get_num_threads(),
    )
    return verdicts if done else None
