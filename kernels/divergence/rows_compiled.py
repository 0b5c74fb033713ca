"""The divergences of rows by a compiled kernel, for a CPU with a C++ compiler: a row of logits is
read from a cache, and of its size nothing but the gradient is written, over it. Rows that share
their target logits share the target's distribution."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

from draftsmith.kernels.dispatch import reads_freely
from draftsmith.kernels.divergence.kind import DivergenceKind
from draftsmith.kernels.divergence.rows import RowInputs, RowTerms
from draftsmith.kernels.host_compiler import address_of, function_of

SOURCE = Path(__file__).with_name("rows_cpu.cpp")
# jsd, whose mixture needs a logarithm of every token, is torch's.
CODES = {
    "forward-kl": 0, "reverse-kl": 1, "tv": 2, "tvd++": 3, "lk-alpha": 4, "lk-hybrid": 5, "ce": 6,
}  # fmt: skip


def _kernel(draft: torch.dtype, target: torch.dtype) -> Any:
    return function_of(SOURCE, "diverge", "ipnpnppppdnnnnppppi", draft, target)


def divergence_rows_compiled(kind: DivergenceKind, rows: RowInputs) -> RowTerms | None:
    """`divergence_rows` in float32, the gradient over the draft logits; None where no kernel
    computes it: another type or layout of logits, jsd, no compiler; sizes or indices that do not
    fit, which torch refuses or reads in its own way."""
    draft, target = rows.draft_logits, rows.target_logits
    if kind.name not in CODES or not _are_readable(rows):
        return None
    kernel = _kernel(draft.dtype, target.dtype)
    if kernel is None or (kind.name == "ce" and rows.columns is None):
        return None
    loss, alpha, keep, outside = torch.empty(4, len(draft), dtype=torch.float32)
    # Held until the kernel has read them.
    weights = rows.weights.contiguous()
    which, vocab_map, columns = (
        None if one is None else one.to(torch.int64).contiguous()
        for one in (rows.which, rows.vocab_map, rows.columns)
    )
    if not _are_in_range(rows, which, vocab_map, columns):
        return None
    kernel(
        CODES[kind.name],
        draft.data_ptr(),
        draft.stride(0),
        target.data_ptr(),
        target.stride(0),
        address_of(which),
        weights.data_ptr(),
        address_of(vocab_map),
        address_of(columns),
        kind.parameter,
        len(draft),
        draft.shape[-1],
        len(target),
        target.shape[-1],
        loss.data_ptr(),
        alpha.data_ptr(),
        None if columns is None else keep.data_ptr(),
        outside.data_ptr(),
        torch.get_num_threads(),
    )
    return RowTerms(loss, alpha, None if columns is None else keep, outside, draft)


def _are_readable(rows: RowInputs) -> bool:
    draft, target, weights, vocab_map, columns, which = rows
    if any(one is not None and not reads_freely(one.device) for one in rows):
        return False
    if draft.ndim != 2 or target.ndim != 2 or weights.dtype != torch.float32:
        return False
    count, num_draft = draft.shape
    return (
        draft.stride(1) == target.stride(1) == 1
        and weights.shape == (count,)
        and (columns is None or columns.shape == (count,))
        and (len(target) == count if which is None else which.shape == (count,))
        and (target.shape[1] == num_draft if vocab_map is None else vocab_map.shape == (num_draft,))
    )


def _are_in_range(
    rows: RowInputs,
    which: torch.Tensor | None,
    vocab_map: torch.Tensor | None,
    columns: torch.Tensor | None,
) -> bool:
    num_distinct, vocab = rows.target_logits.shape
    # Rows of one target row must follow each other.
    return (
        (which is None or (_are_below(which, num_distinct) and bool((which.diff() >= 0).all())))
        and (vocab_map is None or _are_below(vocab_map, vocab))
        # Below 0 the token is outside the draft vocabulary.
        and (columns is None or bool((columns < rows.draft_logits.shape[1]).all()))
    )


def _are_below(indices: torch.Tensor, limit: int) -> bool:
    return bool(((indices >= 0) & (indices < limit)).all())
