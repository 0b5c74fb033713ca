"""Cases: each has several ways of doing the same work, and the bytes that all of them must
move."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch

from draftsmith.kernels.attention.paged import PagedPass
from draftsmith.kernels.attention.pool import PagedPool, Scoring
from draftsmith.kernels.dispatch import BACKENDS
from draftsmith.kernels.products.few_rows import few_rows
from draftsmith.kernels.sampling.draw import draw
from draftsmith.kernels.sampling.filters import SamplingRows
from draftsmith.kernels.sampling.random_streams import Purpose, sample, sample_without_replacement
from draftsmith.kernels.verify.block import verify_block
from draftsmith.kernels.verify.chain import verify_chain, verify_logits
from draftsmith.kernels.verify.tree import verify_tree
from draftsmith.kernels.verify.verdict import Drafts, DraftTree, TreeVerdict
from scripts.bench.kernels.case import Call, Case, Sizes
from scripts.bench.kernels.divergence_cases import divergence_cases

Verify = Callable[..., Any]
CHAINS: dict[str, Verify] = {"chain verification": verify_chain, "block verification": verify_block}
DRAWS: dict[str, dict[str, Any]] = {
    "no filter": {},
    "top-k 50": {"top_k": 50},
    "top-p 0.95": {"top_p": 0.95},
}
USUAL = (32_000, 128_256, 151_936)
FULL = Sizes(USUAL, USUAL, 64, 5, 8192, 4096, 2048, (32, 8, 128))
QUICK = Sizes(USUAL, (32_000,), 4, 5, 512, 128, 512, (8, 4, 32))


def ours_and_reference(
    device: torch.device, call: Callable[[str], Any], *, operation: str = ""
) -> dict[str, Call]:
    """One way on a CPU where nothing is compiled for the operation: "auto" runs its reference."""
    ways = {"reference": lambda: call("torch")}
    has_own = device.type == "cuda" or (operation and BACKENDS[operation].cpu)
    return {"ours": lambda: call("auto"), **ways} if has_own else ways


def all_cases(sizes: Sizes, device: torch.device) -> Iterator[Callable[[], Case]]:
    """Makers, so that one case's tensors are gone before the next one's exist."""
    for vocab_size in sizes.vocabularies:
        for dtype in (
            (torch.float32, torch.bfloat16) if vocab_size == sizes.middle else (torch.float32,)
        ):
            for name, verify in CHAINS.items():
                yield partial(chain_case, name, verify, sizes, vocab_size, device, dtype)
            yield partial(tree_case, sizes, vocab_size, device, dtype)
        yield partial(decide_case, sizes, vocab_size, device)
        for what, options in DRAWS.items():
            yield partial(draw_case, what, options, sizes, vocab_size, device)
    yield from divergence_cases(sizes, device)
    yield partial(attention_case, sizes, device)
    if device.type == "cpu":
        for dtype in (torch.float32, torch.bfloat16):
            for rows in (1, 4, 8, 32):
                yield partial(product_case, rows, dtype)


# Of SmolLM2-135M, `demo`: gate and factor of its MLP, of so many layers that none stays in a cache.
MLP, LAYERS = (3072, 576), 20


def product_case(rows: int, dtype: torch.dtype) -> Case:
    """Products of a pass over some rows: of one token, of a verification, of a batch."""
    weights = [torch.randn(MLP, dtype=dtype) for _ in range(LAYERS)]
    states, num_bytes = torch.randn(rows, MLP[1], dtype=dtype), sum(map(_num_bytes, weights))
    packed = [few_rows(weight, None, pass_bytes=num_bytes) for weight in weights]

    def reference() -> None:
        for weight in weights:
            torch.nn.functional.linear(states, weight)

    def ours() -> None:
        for product in packed:
            assert product is not None
            product(states)

    ways = {"reference": reference} | ({} if None in packed else {"ours": ours})
    shape = f"{LAYERS} x {MLP[1]} to {MLP[0]}, {_named(dtype)}"
    return Case(f"product of {rows} rows, {_named(dtype)}", shape, num_bytes, ways)


@dataclass(frozen=True)
class Round:
    p: torch.Tensor  # [B * (K + 1), V]
    q: torch.Tensor  # [B, K, V]
    drafts: torch.Tensor  # [B, K], drawn from q
    lengths: torch.Tensor
    seeds: torch.Tensor
    positions: torch.Tensor

    @property
    def distribution_bytes(self) -> int:
        return _num_bytes(self.p) + _num_bytes(self.q)


def _num_bytes(tensor: torch.Tensor) -> int:
    return tensor.numel() * tensor.dtype.itemsize


def make_round(
    sizes: Sizes, vocab_size: int, device: torch.device, dtype: torch.dtype = torch.float32
) -> Round:
    """Distributions with a temperature of 1 and a draft that keeps about half of its tokens."""
    generator = torch.Generator(device).manual_seed(vocab_size)
    num_rows, depth = sizes.requests, sizes.depth
    p = 3 * torch.randn(num_rows, depth + 1, vocab_size, generator=generator, device=device)
    q = p[:, :depth] + 0.7 * torch.randn(
        num_rows, depth, vocab_size, generator=generator, device=device
    )
    p, q = p.to(dtype), q.to(dtype)
    seeds, positions = (
        torch.arange(num_rows, device=device),
        100 + torch.arange(num_rows, device=device),
    )
    drafts = torch.stack(
        [sample(q[:, i].float(), seeds, positions + i, Purpose.DRAFT) for i in range(depth)], dim=1
    )
    lengths = torch.full((num_rows,), depth, dtype=torch.int64, device=device)
    return Round(p.flatten(0, 1), q, drafts, lengths, seeds, positions)


def _shape(sizes: Sizes, dtype: torch.dtype) -> str:
    return f"{sizes.requests} x ({sizes.depth}+1) rows, {_named(dtype)}"


def _name(what: str, vocab_size: int, dtype: torch.dtype) -> str:
    return f"{what}, V {vocab_size}" + ("" if dtype == torch.float32 else f", {_named(dtype)}")


def _named(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def chain_case(
    name: str,
    verify: Verify,
    sizes: Sizes,
    vocab_size: int,
    device: torch.device,
    dtype: torch.dtype,
) -> Case:
    one = make_round(sizes, vocab_size, device, dtype)

    def call(impl: str) -> Any:
        return verify(one.p, one.drafts, one.lengths, one.q, one.seeds, one.positions, impl=impl)

    return Case(
        _name(name, vocab_size, dtype), _shape(sizes, dtype), one.distribution_bytes,
        ours_and_reference(device, call), sizes.compiled(vocab_size),
    )  # fmt: skip


# Two children of the root, two of its first child, one of its second: three distributions a
# request.
PARENTS = (-1, -1, 0, 0, 1)
DISTRIBUTION_SLOTS, CHILDREN = (0, 1, 2), (2, 2, 1)


def tree_case(sizes: Sizes, vocab_size: int, device: torch.device, dtype: torch.dtype) -> Case:
    one = make_round(Sizes(**{**vars(sizes), "depth": len(PARENTS)}), vocab_size, device, dtype)
    num_rows, distributions = sizes.requests, len(DISTRIBUTION_SLOTS)
    # The distribution after the root and after nodes 0 and 1: rows 0, 1 and 2 of p, with
    # noise.
    q = one.q[:, :distributions]
    tokens = torch.cat(
        [
            sample_without_replacement(
                q[:, distribution].float(),
                one.seeds,
                one.positions + int(distribution > 0),
                Purpose.DRAFT,
                count,
            )
            for distribution, count in enumerate(CHILDREN)
        ],
        dim=1,
    )
    parents = torch.tensor(PARENTS, device=device).expand(num_rows, -1).contiguous()
    q_rows = torch.full((num_rows, len(PARENTS) + 1), -1, dtype=torch.int64, device=device)
    q_rows[:, list(DISTRIBUTION_SLOTS)] = torch.arange(
        num_rows * distributions, device=device
    ).view(num_rows, distributions)
    tree, told = DraftTree(tokens, parents, one.lengths), q.flatten(0, 1).contiguous()

    def call(impl: str) -> Any:
        return verify_tree(one.p, tree, told, q_rows, one.seeds, one.positions, impl=impl)

    ways = ours_and_reference(device, call)
    floor = visited_rows(call("torch"), q_rows) * vocab_size * dtype.itemsize
    shape = f"{num_rows} x {len(PARENTS)} nodes, {distributions} distributions, {_named(dtype)}"
    return Case(
        _name("tree verification", vocab_size, dtype),
        shape,
        floor,
        ways,
        sizes.compiled(vocab_size),
    )


def visited_rows(verdict: TreeVerdict, q_rows: torch.Tensor) -> int:
    """Rows of p and q that the walks of these verdicts stood at; those of other nodes can be left
    unread."""
    slots = torch.nn.functional.pad(verdict.nodes + 1, (1, 0))
    visited = torch.arange(slots.shape[1], device=slots.device) <= verdict.accepted[:, None]
    told = q_rows.gather(1, slots) >= 0
    return int(visited.sum() + (visited & told).sum())


def decide_case(sizes: Sizes, vocab_size: int, device: torch.device) -> Case:
    """Verification of a chain from raw logits, as a round does it."""
    one, count = make_round(sizes, vocab_size, device), sizes.requests
    rows = SamplingRows.of([0.8] * count, top_k=[50] * count, top_p=[0.95] * count, device=device)
    drafts = Drafts(one.drafts, one.lengths, one.q, one.lengths)

    def call(impl: str) -> Any:
        return verify_logits(one.p, rows, drafts, one.seeds, one.positions, impl=impl)

    name = f"chain verification from logits, V {vocab_size}"
    shape = f"{_shape(sizes, torch.float32)}, temperature 0.8, top-k 50, top-p 0.95"
    ways = ours_and_reference(device, call, operation="verify_logits")
    return Case(name, shape, one.distribution_bytes, ways)


def draw_case(
    what: str, options: dict[str, Any], sizes: Sizes, vocab_size: int, device: torch.device
) -> Case:
    """A token of each request, from logits whose likeliest tokens have most of the mass, as a
    model's have."""
    count = sizes.requests
    noise = torch.rand(count, vocab_size, generator=torch.Generator().manual_seed(0))
    logits = (-2 * noise.clamp_min(1e-9).log() + 0.5 * torch.randn(count, vocab_size)).to(device)
    filters = {name: [value] * count for name, value in options.items()}
    rows = SamplingRows.of([0.8] * count, **filters, device=device)
    seeds = torch.arange(count, device=device)

    def call(impl: str) -> Any:
        return draw(logits, rows, seeds, seeds + 100, Purpose.BONUS, impl=impl)

    ways = ours_and_reference(device, call, operation="draw")
    shape = f"{count} rows, float32, temperature 0.8, {what}"
    return Case(f"draw, {what}, V {vocab_size}", shape, 2 * _num_bytes(logits), ways)


def attention_case(sizes: Sizes, device: torch.device) -> Case:
    heads, kv_heads, width = sizes.layers_kv
    block, new = 16, sizes.depth + 1
    blocks = -(-(sizes.context + new) // block)
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
    pool = PagedPool.empty(
        num_layers=1,
        num_blocks=sizes.requests * blocks,
        block_size=block,
        num_kv_heads=kv_heads,
        key_dim=width,
        device=device,
        dtype=dtype,
    )
    tables = torch.randperm(sizes.requests * blocks, device=device).view(sizes.requests, blocks)
    positions = (sizes.context + torch.arange(new, device=device)).repeat(sizes.requests)
    lengths = torch.full((sizes.requests,), new, dtype=torch.int64, device=device)
    query = torch.randn(1, heads, len(positions), width, device=device, dtype=dtype)
    key, value = (
        torch.randn(1, kv_heads, len(positions), width, device=device, dtype=dtype)
        for _ in range(2)
    )

    def call(impl: str) -> Any:
        one = PagedPass(pool, tables, positions, lengths, impl=impl)
        return one.attend(0, query, key, value, Scoring(width**-0.5))

    floor = 2 * sizes.requests * (sizes.context + new) * kv_heads * width * dtype.itemsize
    shape = (
        f"{sizes.requests} rows of {new} over {sizes.context}, {heads} heads on {kv_heads} of "
        f"{width}"
    )
    ways = ours_and_reference(device, call, operation="attention_context")
    return Case("paged attention", shape, floor, ways, ["reference"])
