"""Layout of a pass in one Triton launch: the slots of its tokens, where its rows start, and tickets
for programs that share work."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from draftsmith.kernels.attention.tiles import next_power_of_2
from draftsmith.kernels.dispatch import on_its_device

# Rows of a pass that a program looks at in one go, each a variant of its kernel.
_ROWS = (64, 512, 4096)


def row_bucket(num_rows: int) -> int:
    """The least of the sizes that kernels are compiled for, or the next power of two."""
    return next((size for size in _ROWS if num_rows <= size), next_power_of_2(num_rows))


@triton.jit(
    do_not_specialize=["num_rows", "num_tokens", "num_tickets", "table_stride"],
    do_not_specialize_on_alignment=["lengths", "block_tables", "kv_indices", "starts", "tickets"],
)
def _lay_out(
    lengths,  # [B] int64
    block_tables,  # [B, max_blocks] int64
    kv_indices,  # [T] int64
    slots,  # [T] int64, written
    starts,  # [B + 1] int64, written
    tickets,  # [num_tickets] int64, written: zeros
    table_stride,
    num_rows,  # B
    num_tokens,  # T
    num_tickets,
    BLOCK_SIZE: tl.constexpr,
    ROWS: tl.constexpr,
    TOKENS: tl.constexpr,
    TICKETS: tl.constexpr,
):
    """Program p: `TOKENS` tokens; the first one also what is not of tokens."""
    rows = tl.arange(0, ROWS)
    ends = tl.cumsum(tl.load(lengths + rows, mask=rows < num_rows, other=0), axis=0)
    if tl.program_id(0) == 0:
        tl.store(starts, 0)
        tl.store(starts + 1 + rows, ends, mask=rows < num_rows)
        every = tl.arange(0, TICKETS)
        tl.store(tickets + every, tl.zeros((TICKETS,), tl.int64), mask=every < num_tickets)
    tokens = tl.program_id(0) * TOKENS + tl.arange(0, TOKENS)
    inside = tokens < num_tokens
    row = tl.sum((ends[None, :] <= tokens[:, None]).to(tl.int64), axis=1)
    index = tl.load(kv_indices + tokens, mask=inside, other=0)
    block = tl.load(block_tables + row * table_stride + index // BLOCK_SIZE, mask=inside, other=0)
    tl.store(slots + tokens, block * BLOCK_SIZE + index % BLOCK_SIZE, mask=inside)


@on_its_device
def lay_out(
    block_size: int,
    block_tables: torch.Tensor,
    kv_indices: torch.Tensor,
    lengths: torch.Tensor,
    num_tickets: int,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """int64 slots [T] of the tokens with `kv_indices` [T] of rows of `lengths` [B], where each row
    starts and the last one ends [B + 1], zeros [num_tickets]. `block_tables` [B, max_blocks]."""
    num_rows, num_tokens = len(lengths), len(kv_indices)
    sizes = (num_tokens, num_rows + 1, num_tickets)
    slots, starts, tickets = torch.empty(
        sum(sizes), dtype=torch.int64, device=lengths.device
    ).split(sizes)
    rows = row_bucket(num_rows)
    tokens = max(1, _ROWS[-1] // rows)
    _lay_out[(max(1, triton.cdiv(num_tokens, tokens)),)](
        lengths.contiguous(),
        block_tables,
        kv_indices,
        slots,
        starts,
        tickets,
        block_tables.stride(0),
        num_rows,
        num_tokens,
        num_tickets,
        BLOCK_SIZE=block_size,
        ROWS=rows,
        TOKENS=tokens,
        TICKETS=next_power_of_2(num_tickets),
    )
    return slots, starts, tickets
