"""Launches of Triton kernels as their launchers make them, without a device: the launchers run on
tensors that say they lie on one and hold nothing."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any, NamedTuple

import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from draftsmith.kernels.attention import paged_triton
from draftsmith.kernels.attention.paged_triton import TritonContext
from draftsmith.kernels.attention.pool import PassLayout, Scoring, TreeLayout, Window
from draftsmith.kernels.attention.tiles import DeviceLimits
from draftsmith.kernels.divergence import rows_triton as divergence
from draftsmith.kernels.divergence.kind import kind_of
from draftsmith.kernels.divergence.rows import RowInputs
from draftsmith.kernels.products.row_steps_triton import (
    HeadNorms,
    Norm,
    WrittenKeys,
    add_normalise,
    gate,
    normalise,
    rotate_and_write,
)
from draftsmith.kernels.sampling.draw_triton import (
    draw_several_triton,
    draw_triton,
    filter_cuts,
    process_triton,
)
from draftsmith.kernels.sampling.filters import Passes, SamplingRows
from draftsmith.kernels.sampling.random_streams import Purpose
from draftsmith.kernels.verify.block_triton import verify_block_triton
from draftsmith.kernels.verify.chain_triton import verify_tempered
from draftsmith.kernels.verify.tree_triton import verify_tree_triton
from draftsmith.kernels.verify.verdict import Drafts, DraftTree

DEVICE = torch.device("cuda:1")  # not the one that is current by itself
I64, F64, F32, BF16 = torch.int64, torch.float64, torch.float32, torch.bfloat16
FILTERED = Passes(True, False, True, 50, True, True)
UNFILTERED = Passes(True, False, True, 0, False, False)
# Multiprocessors, and bytes of shared memory that a program may have, by compute capability.
LIMITS = {
    80: DeviceLimits(108, 163 * 1024),
    90: DeviceLimits(132, 227 * 1024),
    100: DeviceLimits(148, 227 * 1024),
}


class Launch(NamedTuple):
    kernel: Any
    args: tuple[Any, ...]
    options: dict[str, Any]
    device: int  # current device; 0 where nobody set it


@contextmanager
def recorded(capability: int = 90) -> Iterator[list[Launch]]:
    """Launches made within, in place of them."""
    launches: list[Launch] = []
    current = [0]

    class Guard:
        """Stands in for `torch.cuda.device_of`."""

        def __init__(self, tensor: torch.Tensor):
            self.index = tensor.device.index

        def __enter__(self) -> None:
            self.before, current[0] = current[0], self.index

        def __exit__(self, *_: object) -> None:
            current[0] = self.before

    def run(kernel: Any, *args: Any, grid: object, warmup: bool, **options: Any) -> None:
        launches.append(Launch(kernel, args, options, current[0]))

    jitted = type(paged_triton._attend)
    run_before, guard_before = jitted.run, torch.cuda.device_of
    limits_before = paged_triton.limits_of
    try:
        jitted.run, torch.cuda.device_of = run, Guard  # type: ignore[misc]
        paged_triton.limits_of = lambda device: LIMITS[capability]  # type: ignore[assignment]
        with FakeTensorMode():
            yield launches
    finally:
        jitted.run, torch.cuda.device_of = run_before, guard_before  # type: ignore[misc]
        paged_triton.limits_of = limits_before


def empty(*shape: int, dtype: torch.dtype = I64) -> torch.Tensor:
    return torch.empty(shape, dtype=dtype, device=DEVICE)


class Heads(NamedTuple):
    """Of a target's layer."""

    num_heads: int
    kv_heads: int
    key_dim: int
    value_dim: int
    window: Window | None = None
    softcap: float | None = None
    has_sinks: bool = False


def attend(
    heads: Heads,
    dtype: torch.dtype,
    num_rows: int,
    num_tokens: int,
    *,
    has_tree: bool = False,
    num_splits: int | None = None,
    max_blocks: int = 2048,
    block_size: int = 16,
    shift: int = 0,
) -> None:
    """A layer's pass of `num_tokens` over `num_rows`. Numbers of tokens lie `shift` numbers behind
    the start of their memory, as parts of a larger tensor do."""

    def of_tokens() -> torch.Tensor:
        return empty(num_tokens + shift).split([shift, num_tokens])[1]

    tree = TreeLayout(*(of_tokens() for _ in range(3))) if has_tree else None
    layout = PassLayout(empty(num_rows, max_blocks), of_tokens(), empty(num_rows), tree)
    context = replace(TritonContext.of(block_size, layout), num_splits=num_splits)
    query = empty(1, num_tokens, heads.num_heads, heads.key_dim, dtype=dtype).transpose(1, 2)
    sinks = empty(heads.num_heads, dtype=dtype) if heads.has_sinks else None
    context.attend(
        query,
        empty(4096, heads.kv_heads, heads.key_dim, dtype=dtype),
        empty(4096, heads.kv_heads, heads.value_dim, dtype=dtype),
        Scoring(0.1, heads.window, heads.softcap, sinks),
    )


def verify(
    kind: str,
    dtype: torch.dtype,
    *,
    num_draft: int,
    vocab: int,
    has_q: bool,
    requests: int = 4,
    shift: int = 0,
    filtered: bool = False,
) -> None:
    """A round. Numbers of requests lie `shift` numbers behind the start of their memory."""
    rows = requests * (num_draft + 1)

    def vector(count: int = requests, dtype: torch.dtype = I64) -> torch.Tensor:
        return empty(count + shift, dtype=dtype).split([shift, count])[1]

    p, seeds, positions, lengths = empty(rows, vocab, dtype=dtype), vector(), vector(), vector()
    drafts = vector(requests * num_draft).view(requests, num_draft)
    if kind == "tree":
        q = empty(rows, vocab, dtype=dtype) if has_q else None
        tree = DraftTree(drafts, empty(requests, num_draft), lengths)
        q_rows = empty(requests, num_draft + 1) if has_q else None
        verify_tree_triton(p, tree, q, q_rows, seeds, positions)
        return
    q = empty(requests, num_draft, vocab, dtype=dtype) if has_q else None
    if kind == "block":
        assert q is not None
        verify_block_triton(p, drafts, lengths, q, seeds, positions)
    else:
        temperatures, cuts = vector(dtype=F32), None
        if filtered:
            options = (vector(rows, F32), vector(rows), vector(rows, F64), vector(rows, F32))
            cuts = filter_cuts(p, SamplingRows(*options, FILTERED))
        given = Drafts(drafts, lengths, q, lengths), seeds, positions
        verify_tempered(p, temperatures, *given, cuts=cuts)


def diverge(name: str, dtype: torch.dtype, *, has_map: bool, has_tokens: bool, vocab: int) -> None:
    num_draft = 32_000 if has_map else vocab
    rows = RowInputs(
        empty(64, num_draft, dtype=dtype),
        empty(64, vocab, dtype=dtype),
        empty(64, dtype=F32),
        empty(num_draft) if has_map else None,
        empty(64) if has_tokens else None,
    )
    divergence.divergence_rows_triton(kind_of(name), rows)


def draw(
    dtype: torch.dtype = BF16, vocab: int = 128_256, *, filtered: bool = True, drawn: bool = True
) -> None:
    """Of four rows, with scores of all tokens; or their filters alone."""
    options = (empty(4, dtype=F32), empty(4), empty(4, dtype=F64), empty(4, dtype=F32))
    passes = FILTERED if filtered else UNFILTERED
    rows, streams = SamplingRows(*options, passes), (empty(4), empty(4), Purpose.DRAFT)
    logits = empty(4, vocab, dtype=dtype)
    if drawn:
        draw_triton(logits, rows, *streams)
        draw_several_triton(empty(4, vocab, dtype=F32), *streams, 1)
    else:
        process_triton(logits, rows)


class Sizes(NamedTuple):
    """Of a model's layers."""

    hidden: int = 4096
    inner: int = 14336
    heads: int = 32
    kv_heads: int = 8


SIZES, NORM = Sizes(), Norm(1e-5)


def step(
    sizes: Sizes = SIZES,
    norm: Norm = NORM,
    activation: str = "silu",
    dtype: torch.dtype = BF16,
    *,
    norms_heads: bool = False,
) -> None:
    """Steps of a layer: two norms, a rotation and a gate."""
    states, weight = empty(1, 4, sizes.hidden, dtype=dtype), empty(sizes.hidden, dtype=dtype)
    normalise(states, weight, *norm)
    add_normalise(states, states, weight, *norm)
    query, key, value = (
        empty(1, heads, 4, 128, dtype=dtype) for heads in (sizes.heads, *[sizes.kv_heads] * 2)
    )
    keys, values = (empty(64, sizes.kv_heads, 128, dtype=dtype) for _ in "kv")
    angles, of_head = empty(1, 4, 128, dtype=dtype), empty(128, dtype=dtype)
    written = WrittenKeys(key, value, keys, values, empty(4))
    norms = HeadNorms(of_head, of_head, *norm) if norms_heads else None
    rotate_and_write(query, written, angles, angles, norms)
    both = empty(1, 4, sizes.inner, dtype=dtype)
    gate(both, both, activation)


EVERY_LAUNCHER: dict[str, Callable[[], None]] = {
    "attend": lambda: attend(Heads(32, 8, 128, 128), BF16, 2, 12),
    "chain": lambda: verify("chain", BF16, num_draft=5, vocab=128_256, has_q=True),
    "block": lambda: verify("block", BF16, num_draft=5, vocab=128_256, has_q=True),
    "tree": lambda: verify("tree", BF16, num_draft=5, vocab=128_256, has_q=True),
    "draw": draw,
    "step": step,
    "divergence": lambda: diverge("jsd", BF16, has_map=True, has_tokens=True, vocab=128_256),
}
