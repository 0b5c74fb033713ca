"""Cases whose launches are compiled ahead of time: kernels by dtype, head dimensions and what a
layer or a pass has."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import NamedTuple

import torch

from draftsmith.kernels.attention.pool import Chunk
from draftsmith.kernels.divergence.kind import PARAMETERS
from draftsmith.kernels.products.row_steps_triton import Norm
from tests.unit.kernels.launches import Heads, Sizes, attend, diverge, draw, step, verify

BF16, F16, F32 = torch.bfloat16, torch.float16, torch.float32
VOCAB = 128_256


class Case(NamedTuple):
    label: str
    launch: Callable[[], None]


class Layer(NamedTuple):
    window: int | Chunk | None = None
    softcap: float | None = None
    has_sinks: bool = False


PLAIN, FULL = Layer(), Layer(4096, 30.0, True)
# (query heads, kv heads, key dimension, value dimension)
SHAPES = {
    "64": (64, 8, 64, 64),
    "80": (32, 32, 80, 80),
    "96": (32, 8, 96, 96),
    "128": (32, 8, 128, 128),
    "192/128": (32, 8, 192, 128),
    "256": (16, 8, 256, 256),
    "576/512": (128, 1, 576, 512),
}
PASSES = {"decode": (1, 1), "verify": (4, 20), "prompt": (1, 512)}  # rows, tokens


def of_attention(
    shape: str, dtype: torch.dtype, pass_: str, layer: Layer = PLAIN, *, has_tree: bool = False
) -> Case:
    rows, tokens = PASSES[pass_]
    heads = Heads(*SHAPES[shape], *layer)
    parts = [shape, str(dtype).removeprefix("torch."), pass_]
    parts += ["tree"] * has_tree + ["chunks"] * isinstance(layer.window, Chunk)
    parts += ["window"] * isinstance(layer.window, int) + ["softcap"] * (layer.softcap is not None)
    parts += ["sinks"] * layer.has_sinks

    def launch() -> None:
        attend(heads, dtype, rows, tokens, has_tree=has_tree)

    return Case(" ".join(parts), launch)


def of_verification(
    kind: str, dtype: torch.dtype, num_draft: int, *, has_q: bool, filtered: bool = False
) -> Case:
    label = f"{kind} {str(dtype).removeprefix('torch.')} {num_draft} drafts{' q' * has_q}"
    given = {"num_draft": num_draft, "vocab": VOCAB, "has_q": has_q, "filtered": filtered}
    return Case(label + " filtered" * filtered, lambda: verify(kind, dtype, **given))


def of_divergence(
    name: str, dtype: torch.dtype, *, has_map: bool = True, has_tokens: bool = True
) -> Case:
    label = f"{name} {str(dtype).removeprefix('torch.')}{' map' * has_map}{' text' * has_tokens}"
    return Case(
        label, lambda: diverge(name, dtype, has_map=has_map, has_tokens=has_tokens, vocab=VOCAB)
    )


def of_draw(dtype: torch.dtype, vocab: int, *, filtered: bool = True, drawn: bool = True) -> Case:
    label = f"draw {str(dtype).removeprefix('torch.')} {vocab}"
    return Case(label, lambda: draw(dtype, vocab, filtered=filtered, drawn=drawn))


def of_steps(
    sizes: Sizes,
    norm: Norm,
    activation: str,
    dtype: torch.dtype = BF16,
    *,
    norms_heads: bool = False,
) -> Case:
    def launch() -> None:
        step(sizes, norm, activation, dtype, norms_heads=norms_heads)

    return Case(f"steps {sizes.hidden} {activation} {str(dtype).removeprefix('torch.')}", launch)


# 1B, 8B and 70B of one family.
STEPS = (Sizes(2048, 8192), Sizes(4096, 14336), Sizes(8192, 28672, 64))
LLAMA, GEMMA = Norm(0.0), Norm(0.0, 1.0, True)

# The first of them for an sm_80, which has the least shared memory, the others for an sm_90.
FEW = [
    of_attention("128", BF16, "prompt", FULL, has_tree=True),
    of_verification("chain", BF16, 5, has_q=True),
    of_divergence("jsd", BF16),
]


def _cases() -> Iterator[Case]:
    for shape in SHAPES:
        for pass_ in ("decode", "prompt"):
            for layer in (PLAIN, FULL):
                for has_tree in (False, True):
                    yield of_attention(shape, BF16, pass_, layer, has_tree=has_tree)
        yield of_attention(shape, BF16, "verify")
        yield of_attention(shape, F16, "decode")
        yield of_attention(shape, F32, "decode")
        yield of_attention(shape, F32, "prompt", FULL, has_tree=True)
    yield of_attention("128", BF16, "decode", Layer(Chunk(8192)))
    yield of_attention("128", BF16, "prompt", Layer(Chunk(8192)), has_tree=True)
    for dtype in (BF16, F16, F32):
        for has_q in (True, False):
            for filtered in (False, True):
                yield of_verification("chain", dtype, 5, has_q=has_q, filtered=filtered)
            yield of_verification("tree", dtype, 24, has_q=has_q)
        yield of_verification("chain", dtype, 1, has_q=True)
        yield of_verification("chain", dtype, 16, has_q=True)
        yield of_verification("block", dtype, 5, has_q=True)
    for name in PARAMETERS:
        yield of_divergence(name, BF16)
        yield of_divergence(name, F32, has_map=False)
    for has_map in (True, False):
        yield of_divergence("tv", BF16, has_map=has_map, has_tokens=False)
    for dtype, vocab in (
        (BF16, 151_936),
        (BF16, 32_000),
        (BF16, 128_256),
        (F16, 151_936),
        (F32, 151_936),
    ):
        for filtered, drawn in ((True, True), (True, False), (False, True)):
            yield of_draw(dtype, vocab, filtered=filtered, drawn=drawn)
    for sizes in STEPS:
        yield of_steps(sizes, LLAMA, "silu")
    yield of_steps(STEPS[-1], GEMMA, "gelu", norms_heads=True)
    yield of_steps(STEPS[-1], LLAMA, "gelu_tanh", F32, norms_heads=True)


CASES = list(_cases())

# Shape and layers of two targets: one kind of layer, and two, one of them with a window.
SERVED = {"alike": ("128", [PLAIN]), "with windows": ("256", [PLAIN, Layer(1024)])}


def served_passes(shape: str, layers: list[Layer], *, max_batch: int = 64) -> Iterator[Case]:
    """Every pass that a server of `max_batch` meets, up to what the launcher can tell apart: rows of
    any number with up to 17 tokens each, a piece of a prompt beside them, trees, contexts of any
    length. Tensors of tokens start at any multiple of eight bytes."""
    heads = Heads(*SHAPES[shape])
    for rows in (*range(1, 10), 12, 16, 17, 24, 32, 33, 48, 63, 64, 65):
        for tokens in (rows, rows + 1, 2 * rows, 6 * rows, 17 * rows, rows + 512, rows + 2047):
            for has_tree in (False, True):
                yield of_pass(heads, layers, rows, tokens, 1 << (rows + tokens) % 14, has_tree)


def served_rounds() -> Iterator[Case]:
    """Rounds that a server of 64 requests with k up to 7, or with trees, verifies. Tensors of
    requests start at any multiple of eight bytes."""
    for requests in (*range(1, 9), 16, 17, 24, 33, 48, 63, 64):
        for kind, drafts in (("chain", range(8)), ("block", range(1, 8)), ("tree", (1, 2, 7, 63))):
            for num_draft in drafts:
                for has_q in (True, False) if kind != "block" else (True,):
                    yield of_round(kind, requests, num_draft, has_q)


def of_round(kind: str, requests: int, num_draft: int, has_q: bool) -> Case:
    def launch() -> None:
        verify(
            kind, F32, num_draft=num_draft, vocab=VOCAB, has_q=has_q, requests=requests,
            shift=(requests + num_draft) % 2,
        )  # fmt: skip

    return Case(f"{kind}, {requests} requests, {num_draft} drafts", launch)


def of_pass(
    heads: Heads, layers: list[Layer], rows: int, tokens: int, max_blocks: int, has_tree: bool
) -> Case:
    def launch() -> None:
        for layer in layers:
            changed = heads._replace(window=layer.window)
            shift = (rows + tokens) % 2
            attend(
                changed, BF16, rows, tokens, has_tree=has_tree, max_blocks=max_blocks, shift=shift
            )

    return Case(f"{rows} rows, {tokens} tokens, {max_blocks} blocks", launch)
