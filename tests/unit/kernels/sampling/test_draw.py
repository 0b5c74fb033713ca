"""Draws by the compiled kernel: the reference's tokens and distributions, or none."""

from __future__ import annotations

import math
from functools import partial

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from draftsmith.kernels.sampling import draw as module
from draftsmith.kernels.sampling.draw import draw, draw_compiled, draw_kernel
from draftsmith.kernels.sampling.filters import SamplingRows
from draftsmith.kernels.sampling.random_streams import Purpose
from tests.goodness import g_test
from tests.sampled_rows import logits_of, options, rows_of, streams

draw_torch = partial(draw, impl="torch")
compiler = pytest.mark.skipif(draw_kernel() is None, reason="there is no C++ compiler")


@compiler
@settings(max_examples=150, deadline=None)
@given(
    st.integers(0, 10**6),
    st.lists(options, min_size=1, max_size=4),
    st.sampled_from([1, 2, 15, 17, 300, 513, 1025, 4096]),
    st.sampled_from([0.0, 0.1, 3.0, 30.0]),
    st.sampled_from(list(Purpose)),
)
def test_what_the_kernel_decides_is_what_torch_decides(
    seed: int, values: list[dict[str, float]], tokens: int, scale: float, purpose: Purpose
) -> None:
    rows, logits = rows_of(values), logits_of(seed, len(values), tokens, scale)
    found = draw_compiled(logits, rows, *streams(len(values), seed=seed), purpose)
    if found is not None:
        expected = draw_torch(logits, rows, *streams(len(values), seed=seed), purpose)
        assert found[0].tolist() == expected.tokens.tolist()
        assert torch.equal(found[1], expected.logits)


@compiler
@pytest.mark.parametrize(
    ("values", "least"),
    [({}, 0.99), ({"top_k": 50}, 0.99), ({"top_p": 0.9}, 0.9), ({"min_p": 0.05}, 0.95)],
)
def test_the_kernel_decides_nearly_always_and_as_torch(
    values: dict[str, float], least: float
) -> None:
    filters = {name: [value] for name, value in values.items()}
    decided = 0
    for seed in range(200):
        logits = 3 * torch.randn(1, 1024, generator=torch.Generator().manual_seed(seed))
        arguments = (logits, SamplingRows.of([0.8], **filters), *streams(1, seed=seed))  # type: ignore[arg-type]
        found = draw_compiled(*arguments, Purpose.BONUS)
        if found is not None:
            decided += 1
            expected = draw_torch(*arguments, Purpose.BONUS)
            assert found[0].tolist() == expected.tokens.tolist()
            assert torch.equal(found[1], expected.logits)
    assert decided >= least * 200


@compiler
def test_rows_that_lie_apart_and_several_threads() -> None:
    table = 3 * torch.randn(6, 2, 700, generator=torch.Generator().manual_seed(0))
    rows, threads = SamplingRows.of([1.0] * 6, top_k=[40] * 6), torch.get_num_threads()
    expected = draw_torch(table[:, 1], rows, *streams(6), Purpose.DRAFT)
    torch.set_num_threads(3)
    try:
        found = draw_compiled(table[:, 1], rows, *streams(6), Purpose.DRAFT)
    finally:
        torch.set_num_threads(threads)
    assert found is not None
    assert found[0].tolist() == expected.tokens.tolist()
    assert torch.equal(found[1], expected.logits)


@compiler
@pytest.mark.parametrize(
    "logits",
    [
        torch.full((1, 40), -math.inf),  # no distribution
        torch.full((1, 40), math.nan),
        torch.full((1, 40), 1e30),  # differences are beyond float32
    ],
)
def test_what_rounding_or_nothing_decides_is_left_to_torch(logits: torch.Tensor) -> None:
    rows = SamplingRows.of([1.0])
    assert draw_compiled(logits, rows, *streams(1), Purpose.DRAFT) is None
    drawn = draw(logits, rows, *streams(1), Purpose.DRAFT)
    expected = draw_torch(logits, rows, *streams(1), Purpose.DRAFT)
    assert drawn.tokens.tolist() == expected.tokens.tolist()


@compiler
def test_rows_that_torch_decides_leave_the_others_to_the_kernel() -> None:
    logits = 3 * torch.randn(4, 300, generator=torch.Generator().manual_seed(0))
    logits[1], logits[2] = math.nan, 0.0
    rows = SamplingRows.of([1.0] * 4, top_p=[0.9, 0.9, 0.55, 0.9], min_p=[0.0, 0.0, 1.0, 0.0])
    found = draw_compiled(logits, rows, *streams(4), Purpose.DRAFT)
    expected = draw_torch(logits, rows, *streams(4), Purpose.DRAFT)
    assert found is not None
    assert found.tokens.tolist() == expected.tokens.tolist()
    assert torch.equal(found.logits, expected.logits)


def test_without_a_compiler_torch_draws(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "draw_compiled", lambda *_: None)
    logits, rows = torch.randn(2, 30), SamplingRows.of([0.0, 0.9])
    found = draw(logits, rows, *streams(2), Purpose.DRAFT)
    assert torch.equal(found.logits, draw_torch(logits, rows, *streams(2), Purpose.DRAFT).logits)


@compiler
def test_draws_follow_the_distribution_of_float64() -> None:
    """20,000 draws beside top-p of 0.9 in float64, and not beside no filter at all."""
    count, part = 20_000, 200
    logits = 1.5 * torch.randn(1, 24, generator=torch.Generator().manual_seed(1))
    rows = SamplingRows.of([0.8] * part, top_p=[0.9] * part)
    tokens, decided = [], 0
    for begin in range(0, count, part):
        seeds = torch.arange(begin, begin + part)
        arguments = logits.expand(part, -1), rows, seeds, torch.zeros_like(seeds), Purpose.BONUS
        decided += draw_compiled(*arguments) is not None
        tokens += draw(*arguments).tokens.tolist()
    assert decided > 0.9 * count / part
    probs = (logits[0].double() / 0.8).softmax(-1)
    order = probs.argsort(descending=True)
    kept = order[: int((probs[order].cumsum(0) < 0.9).sum()) + 1]
    filtered = torch.zeros_like(probs).index_copy(0, kept, probs[kept])
    counts = torch.bincount(torch.tensor(tokens), minlength=24)
    assert g_test(counts, filtered / filtered.sum()).p_value > 1e-4
    assert g_test(counts, probs).p_value < 1e-9


@compiler
@pytest.mark.parametrize("top_k", [0, 700])
@pytest.mark.parametrize("top_p", [0.02, 0.5, 0.95, 0.999, 0.999999])
@pytest.mark.parametrize("scale", [0.0, 1e-3, 1.0, 8.0, 1e30])
def test_top_p_keeps_what_torch_keeps_of_flat_and_of_steep_logits(
    scale: float, top_p: float, top_k: int
) -> None:
    rows = SamplingRows.of([0.8] * 6, top_p=[top_p] * 6, top_k=[top_k] * 6)
    logits = logits_of(7, 6, 3000, 1.0) * scale
    for row in range(6):
        one = rows.select(slice(row, row + 1))
        found = draw_compiled(logits[row : row + 1], one, *streams(1, seed=row), Purpose.BONUS)
        if found is not None:
            expected = draw_torch(logits[row : row + 1], one, *streams(1, seed=row), Purpose.BONUS)
            assert found[0].tolist() == expected.tokens.tolist()
            assert torch.equal(found[1], expected.logits)
