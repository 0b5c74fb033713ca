"""Fused attention of the unroll beside a dense mask over the keys of all steps, and its memory."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from typing import Any

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.nn.attention import flex_attention

from draftsmith.drafters.blocks import block_unroll
from draftsmith.drafters.target.packed_pass import positions_of
from draftsmith.drafters.unrolled import attention, flex, unroll
from draftsmith.drafters.unrolled.unroll import UnrollPass
from draftsmith.kernels.attention.pool import Scoring
from tests.peak_memory import Memory, memory_of
from tests.unit.drafters.blocks import test_block_attention as of_blocks

STEPS, HEADS, KV_HEADS, WIDTH = 4, 4, 2, 8
SEGMENTS = torch.tensor([[0] * 150 + [1] * 3 + [2] * 130 + [-1] * 17, [0] * 20 + [1] * 280])


def states(
    rows: int, length: int, first: int, dtype: torch.dtype = torch.float64, width: int = WIDTH
) -> list[list[torch.Tensor]]:
    """Query, key and value of each step."""
    generator = torch.Generator().manual_seed(0)
    shapes = [
        (rows, heads, length - (first if step else 0), width)
        for step in range(STEPS)
        for heads in (HEADS, KV_HEADS, KV_HEADS)
    ]
    made = [torch.randn(shape, generator=generator, dtype=dtype) for shape in shapes]
    return [[one.requires_grad_() for one in made[at : at + 3]] for at in range(0, len(made), 3)]


def unrolled(
    of_steps: list[list[torch.Tensor]],
    segments: torch.Tensor | None,
    first: int,
    window: int | None,
) -> list[torch.Tensor]:
    """[B, heads, N, D] of each step."""
    context, found = UnrollPass(segments, first=first), []
    for query, key, value in of_steps:
        output = context.attend(0, query, key, value, Scoring(0.4, window))
        found.append(output.transpose(1, 2))
        context.next_step()
    return found


def dense(
    of_steps: list[list[torch.Tensor]], begins: torch.Tensor, first: int, window: int | None
) -> list[torch.Tensor]:
    """The same by a mask over all keys of all steps; `begins` [B, L] of each column's text."""
    found = []
    for step, (query, *_) in enumerate(of_steps):
        columns = torch.arange(first if step else 0, begins.shape[1])[:, None]
        keys, values, seen = [], [], []
        for made, (_, key, value) in enumerate(of_steps[: step + 1]):
            others = torch.arange(first if made else 0, begins.shape[1])
            back = columns - others
            own = back == step - made if made else back >= step
            own = own & (back < (window or back.numel()))
            if not made:
                own = own & (others >= begins[:, columns[:, 0], None])
            seen.append(own.expand(len(query), -1, -1))
            keys.append(key.repeat_interleave(HEADS // KV_HEADS, 1))
            values.append(value.repeat_interleave(HEADS // KV_HEADS, 1))
        scores = 0.4 * query @ torch.cat(keys, 2).transpose(-1, -2)
        mask = torch.cat(seen, -1)[:, None]
        found.append(scores.masked_fill(~mask, -torch.inf).softmax(-1) @ torch.cat(values, 2))
    return found


def check(
    segments: torch.Tensor | None,
    first: int,
    window: int | None,
    length: int = 300,
    *,
    width: int = WIDTH,
    on: tuple[str, torch.dtype] = ("cpu", torch.float64),
    **near: float,
) -> None:
    rows, length = (2, length) if segments is None else segments.shape
    positions = (
        torch.arange(length).expand(rows, -1) if segments is None else positions_of(segments)
    )
    begins = torch.arange(length) - positions
    of_steps = states(rows, length, first, width=width)
    moved = [[one.to(*on) for one in made] for made in of_steps]
    placed = None if segments is None else segments.to(on[0])
    leaves = [one for made in of_steps for one in made]
    ways = (
        [one.cpu().double() for one in unrolled(moved, placed, first, window)],
        dense(of_steps, begins, first, window),
    )
    gradients = []
    for outputs in ways:
        generator, total = torch.Generator().manual_seed(1), torch.zeros(())
        for step, output in enumerate(outputs):
            begin = first if step else 0
            # what counts: the chain lies in the text, and behind the first column that drafts
            counts = positions[:, begin:] >= step
            counts = counts & (torch.arange(begin, length) >= begin + step)
            noise = torch.randn(output.shape, generator=generator, dtype=output.dtype)
            total = total + (output * noise * counts[:, None, :, None]).sum()
        gradients.append(torch.autograd.grad(total, leaves, allow_unused=True))
        assert total.isfinite()
    near = near or {"atol": 1e-7, "rtol": 1e-7}
    torch.testing.assert_close(ways[0][0], ways[1][0], **near)
    for one, other in zip(*gradients, strict=True):
        torch.testing.assert_close(one, other, **near)


@pytest.mark.parametrize(
    "packed, window, first",
    [
        *((False, window, 0) for window in (None, 1, 60, 290)),
        *((True, *one) for one in ((None, 1), (2, 37), (4, 160), (129, 1), (1000, 37))),
    ],
)
def test_values_and_gradients_are_those_of_a_dense_mask(
    packed: bool, window: int | None, first: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(unroll, "LONG", 0)
    asked = []
    monkeypatch.setattr(attention, "fused", counted(attention.fused, asked))
    check(SEGMENTS if packed else None, first, window)
    assert len(asked) == STEPS


@pytest.mark.parametrize(
    "packed, window, first",
    [
        (False, None, 0),
        pytest.param(True, None, 45, marks=pytest.mark.long),
        pytest.param(False, 2, 45, marks=pytest.mark.long),
        pytest.param(True, 20, 0, marks=pytest.mark.long),
    ],
)
def test_flex_attention_gives_those_of_a_dense_mask(
    packed: bool, window: int | None, first: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(unroll, "LONG", 0)
    monkeypatch.setattr(attention, "can_flex", lambda query, value: True)
    asked = []
    monkeypatch.setattr(attention, "flex", counted(attention.flex, asked))
    # torch takes no gradients of it on a CPU, though its uncompiled form has them.
    monkeypatch.setattr(flex_attention, "_validate_device", lambda *states: None)
    check(SEGMENTS[:, 110:190] if packed else None, first, window, length=80)
    assert len(asked) == STEPS


@pytest.mark.gpu
@pytest.mark.parametrize("first", [0, 45])
@pytest.mark.parametrize("window", [None, 60])
@pytest.mark.parametrize("packed", [False, True])
def test_compiled_flex_attention_gives_those_of_a_dense_mask(
    packed: bool, window: int | None, first: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(unroll, "LONG", 0)
    asked = []
    monkeypatch.setattr(attention, "flex", counted(attention.flex, asked))
    for length in (300, 217, 280):
        segments = SEGMENTS[:, :length] if packed else None
        on = ("cuda", torch.float32)
        check(segments, first, window, length, width=32, on=on, atol=5e-3, rtol=5e-3)
    assert len(asked) == 3 * STEPS


def counted(call: Callable[..., torch.Tensor], asked: list[int]) -> Callable[..., torch.Tensor]:
    def inner(*arguments: object) -> torch.Tensor:
        asked.append(1)
        return call(*arguments)

    return inner


@pytest.mark.parametrize("blocks, window", [(False, None), (False, 60), (True, 20)])
def test_the_reference_finds_a_fault(
    blocks: bool, window: int | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(unroll, "LONG", 0)
    monkeypatch.setattr(block_unroll, "LONG", 0)
    true, narrower = attention.fused, (window or 300) - 1
    monkeypatch.setattr(
        attention, "fused", lambda *given: true(*given[:3], replace(given[3], window=narrower))
    )
    with pytest.raises(AssertionError):
        if blocks:
            made = of_blocks.states(80, 0, own_context=False)
            of_blocks.check(made, None, 0, window, causal=True)
        else:
            check(None, 0, window)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_lower_precision_is_near(dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(unroll, "LONG", 0)
    exact = unrolled(states(1, 300, 0), None, 0, 60)
    near = unrolled([[one.to(dtype) for one in made] for made in states(1, 300, 0)], None, 0, 60)
    for one, other in zip(exact, near, strict=True):
        assert other.dtype == dtype
        torch.testing.assert_close(other.double(), one, atol=3e-2, rtol=3e-2)


def memory_of_length(length: int, window: int | None, packed: bool) -> Memory:
    segments = (torch.arange(length) // 700)[None] if packed else None
    of_steps = states(1, length, 0, torch.float32)

    def call() -> None:
        sum(output.sum() for output in unrolled(of_steps, segments, 0, window)).backward()

    return memory_of(call)


@pytest.mark.parametrize("window, packed", [(None, False), (128, True)])
def test_memory_grows_with_the_length_and_not_with_its_square(
    window: int | None, packed: bool
) -> None:
    short, long = (memory_of_length(length, window, packed) for length in (2048, 4096))
    assert long.peak < 2.1 * short.peak
    # Keys of the longest chains, and no scores, which are 128 a query and more.
    assert long.largest == 4096 * (STEPS - 1) * KV_HEADS * WIDTH * 4


# Where flex_attention may run


@pytest.fixture(autouse=True)
def fresh() -> Iterator[None]:
    yield
    flex._limit_reached.clear()


def test_one_variant_too_many_ends_it_with_one_line(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(flex, "RECOMPILES", 2)
    monkeypatch.setattr(torch, "compile", partial(torch.compile, backend="eager"))

    def named(states: torch.Tensor, name: str) -> torch.Tensor:
        return states + len(name)

    compiled = flex._compiled(named)
    for name in ("a", "bc"):
        assert compiled(torch.zeros(()), name) == len(name)
    assert not flex._limit_reached.is_set()
    for name in ("def", "ghij"):
        with pytest.raises(flex.LimitReached):
            compiled(torch.zeros(()), name)
    with FakeTensorMode():
        states = torch.empty(1, 2, 4, 64, device="cuda")
    assert not flex.can_flex(states, states)
    assert [one.levelname for one in caplog.records if one.name == flex.log.name] == ["WARNING"]


def reached(*given: Any) -> torch.Tensor:
    raise flex.LimitReached


@pytest.mark.parametrize("part", ["flex", "block_mask"])
def test_attention_goes_on_in_chunks(part: str, monkeypatch: pytest.MonkeyPatch) -> None:
    for module in (unroll, block_unroll):
        monkeypatch.setattr(module, "LONG", 0)
    monkeypatch.setattr(attention, "can_flex", lambda query, value: True)
    monkeypatch.setattr(attention, "reads_freely", lambda device: False)
    monkeypatch.setattr(attention, part, reached)
    check(None, 0, None, length=80)
    made = of_blocks.states(80, 0, own_context=False)
    of_blocks.check(made, None, 0, None, causal=True)
