"""Attention of blocks of slots beside a dense mask over context and slots, and its memory."""

from __future__ import annotations

import pytest
import torch
from torch.nn.attention import flex_attention

from draftsmith.drafters.blocks import block_unroll
from draftsmith.drafters.blocks.block_unroll import BlockPass
from draftsmith.drafters.target.packed_pass import begins_of
from draftsmith.drafters.unrolled import attention, fused_unroll
from draftsmith.kernels.attention.pool import Scoring
from tests.peak_memory import Memory, memory_of

HEADS, KV_HEADS, WIDTH, SLOTS = 4, 2, 8, 3
SEGMENTS = torch.tensor([[0] * 40 + [1] * 3 + [2] * 30 + [-1] * 7, [0] * 9 + [1] * 71])
States = list[torch.Tensor]


def states(
    length: int,
    first: int,
    *,
    own_context: bool,
    value_width: int = WIDTH,
    rows: int = 2,
    width: int = WIDTH,
) -> States:
    """Query, key and value of the slots, and keys and values of the context unless slots are it."""
    generator = torch.Generator().manual_seed(0)
    count = (length - first) * SLOTS + (first if own_context else 0)
    shapes = [(HEADS, count, width), (KV_HEADS, count, width), (KV_HEADS, count, value_width)]
    if not own_context:
        shapes += [(KV_HEADS, length, width), (KV_HEADS, length, value_width)]
    made = [torch.randn(rows, *shape, generator=generator, dtype=torch.float64) for shape in shapes]
    return [one.requires_grad_() for one in made]


def attended(
    made: States, segments: torch.Tensor | None, first: int, window: int | None, causal: bool
) -> torch.Tensor:
    context = None if len(made) == 3 else [(made[3], made[4])]
    passed = BlockPass(context, slots=SLOTS, causal=causal, segments=segments, first=first)
    return passed.attend(0, *made[:3], Scoring(0.4, window)).transpose(1, 2)


def dense(
    made: States, begins: torch.Tensor, first: int, window: int | None, causal: bool
) -> torch.Tensor:
    """The same by a mask over all keys; `begins` [B, L] of each column's text."""
    query, key, value, *context = made
    length = begins.shape[1]
    columns = torch.arange(first, length).repeat_interleave(SLOTS)
    slots = torch.arange(SLOTS).repeat(length - first)
    if not context:  # the slots that stand alone, each a block of one
        columns = torch.cat([torch.arange(first), columns])
        slots = torch.cat([torch.zeros(first, dtype=torch.int64), slots])
        context = [one[:, :, slots == 0] for one in (key, value)]
    places = columns + slots
    back = places[:, None] - torch.arange(length)
    seen = (torch.arange(length) < columns[:, None]) & (back < (window or back.numel()))
    seen = seen & (torch.arange(length) >= begins[:, columns, None])
    back = places[:, None] - places
    own = (columns[:, None] == columns) & (back < (window or back.numel()))
    own = own & (back >= 0) if causal else own
    mask = torch.cat([seen, own.expand(len(query), -1, -1)], dim=-1)[:, None]
    keys, values = (
        torch.cat(pair, dim=2).repeat_interleave(HEADS // KV_HEADS, 1)
        for pair in zip(context, (key, value), strict=True)
    )
    scores = 0.4 * query @ keys.transpose(-1, -2)
    return scores.masked_fill(~mask, -torch.inf).softmax(-1) @ values


def check(
    made: States,
    segments: torch.Tensor | None,
    first: int,
    window: int | None,
    causal: bool,
    *,
    length: int = 80,
    on: tuple[str, torch.dtype] = ("cpu", torch.float64),
    **near: float,
) -> None:
    rows, length = (2, length) if segments is None else segments.shape
    placed = None if segments is None else segments.to(on[0])
    begins = torch.zeros(rows, length, dtype=torch.int64)
    begins = begins if segments is None else begins_of(segments)
    outputs = (
        attended([one.to(*on) for one in made], placed, first, window, causal).cpu().double(),
        dense(made, begins, first, window, causal),
    )
    near = near or {"atol": 1e-7, "rtol": 1e-7}
    torch.testing.assert_close(*outputs, **near)
    noise = torch.randn(
        outputs[0].shape, generator=torch.Generator().manual_seed(1), dtype=torch.float64
    )
    gradients = [torch.autograd.grad((one * noise).sum(), made) for one in outputs]
    for one, other in zip(*gradients, strict=True):
        torch.testing.assert_close(one, other, **near)


@pytest.fixture(autouse=True)
def as_of_long_texts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(block_unroll, "LONG", 0)
    monkeypatch.setattr(fused_unroll, "BAND", 16)


@pytest.fixture
def way(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    if request.param == "flex":
        use_flex(monkeypatch)
    if request.param == "dense":
        monkeypatch.setattr(block_unroll, "LONG", 80)
    if request.param == "recomputed":
        monkeypatch.setattr(attention, "reads_freely", lambda device: False)


def use_flex(monkeypatch: pytest.MonkeyPatch) -> None:
    # torch takes no gradients of it on a CPU, though its uncompiled form has them.
    monkeypatch.setattr(flex_attention, "_validate_device", lambda *states: None)
    monkeypatch.setattr(attention, "can_flex", lambda query, value: True)
    monkeypatch.setattr(attention, "fused", None)


@pytest.mark.parametrize("window, first", [(None, 0), (1, 45), (2, 1), (4, 0), (20, 0), (75, 45)])
@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize("own_context", [False, True])
def test_values_and_gradients_are_those_of_a_dense_mask(
    own_context: bool, packed: bool, window: int | None, first: int
) -> None:
    made = states(80, first, own_context=own_context)
    check(made, SEGMENTS if packed else None, first, window, causal=True)


@pytest.mark.parametrize(
    "own_context, packed, window",
    [
        (True, True, 20),
        pytest.param(True, False, 20, marks=pytest.mark.long),
        pytest.param(False, True, None, marks=pytest.mark.long),
        pytest.param(False, False, 2, marks=pytest.mark.long),
    ],
)
def test_flex_attention_gives_those_of_a_dense_mask(
    own_context: bool, packed: bool, window: int | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    use_flex(monkeypatch)
    segments, first = (SEGMENTS, 45) if packed else (None, 0)
    check(states(80, first, own_context=own_context), segments, first, window, causal=True)


@pytest.mark.gpu
@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("window", [None, 20])
@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize("own_context", [False, True])
def test_compiled_flex_attention_gives_those_of_a_dense_mask(
    own_context: bool,
    packed: bool,
    window: int | None,
    causal: bool,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    asked = []
    true = attention.flex
    monkeypatch.setattr(attention, "flex", lambda *given: asked.append(1) or true(*given))
    for length, first in ((80, 0), (71, 0), (80, 45)):
        made = states(length, first, own_context=own_context, width=32, value_width=32)
        segments = SEGMENTS[:, :length] if packed else None
        on = ("cuda", torch.float32)
        check(made, segments, first, window, causal, length=length, on=on, atol=5e-3, rtol=5e-3)
    assert len(asked) == 3 + own_context


@pytest.mark.parametrize(
    "way, window",
    [("fused", None), ("fused", 20), ("flex", 20), ("dense", 20), ("recomputed", None)],
    indirect=["way"],
)
def test_blocks_may_see_all_of_themselves(window: int | None, way: None) -> None:
    check(states(80, 37, own_context=False), SEGMENTS, 37, window, causal=False)


@pytest.mark.parametrize(
    "way, value_width",
    [("fused", 4), ("fused", 12), ("flex", 12), ("dense", 4), ("recomputed", 12)],
    indirect=["way"],
)
def test_values_may_be_of_another_width(value_width: int, way: None) -> None:
    made = states(80, 1, own_context=True, value_width=value_width)
    check(made, SEGMENTS, 1, None, causal=True)


def memory_of_length(length: int, window: int | None) -> Memory:
    made = [
        one.detach().float().requires_grad_()
        for one in states(length, 0, own_context=False, rows=1)
    ]
    return memory_of(lambda: attended(made, None, 0, window, True).sum().backward())


@pytest.mark.parametrize("window", [None, 128])
def test_memory_grows_with_the_length_and_not_with_its_square(window: int | None) -> None:
    short, long = (memory_of_length(length, window) for length in (1024, 2048))
    assert long.peak < 2.1 * short.peak
    assert long.largest == 2048 * SLOTS * HEADS * WIDTH * 4  # no scores
