"""Filters and draws in Triton: the reference's sets and tokens, without an order, a look at a value
or a shape that depends on one."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from draftsmith.errors import UserError
from draftsmith.kernels.sampling.draw import draw, draw_several
from draftsmith.kernels.sampling.draw_triton import draw_triton
from draftsmith.kernels.sampling.filters import SamplingRows, process
from draftsmith.kernels.sampling.random_streams import Purpose
from tests.sampled_rows import logits_of, options, rows_of, streams

# Of a mass, by which sums and exponentials in float32 may be off; of a probability twenty times.
OFF = 1e-6


def kept_in_float64(row: torch.Tensor, rows: SamplingRows, off: float) -> torch.Tensor:
    """What the filters of one row keep of [V] scaled logits, as they are defined; masses that are
    removed are `off` larger, as large as they may be."""
    kept = row > -math.inf
    if not kept.any() or rows.passes.all_greedy:
        return kept
    x, order = row.double().sort(stable=True)
    if top_k := int(rows.top_k[0]):
        x = x.masked_fill(x < x[-min(top_k, len(x))], -math.inf)
    if rows.passes.top_p:
        removed = x.softmax(-1).cumsum(-1) <= float((1 - rows.top_p[0]).float()) + off
        removed[-1] = False
        x = x.masked_fill(removed, -math.inf)
    least = float(rows.min_p[0])
    if least > 0:
        x = x.masked_fill((x - x[-1]).exp() < least * (1 + 20 * off), -math.inf)
    return torch.zeros_like(kept).scatter(-1, order, x > -math.inf)


def adversarial(kind: str, seed: int, size: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    row = torch.randn(1, size, generator=generator)
    if kind == "one-hot":
        return torch.full_like(row, -math.inf).index_fill_(1, row.argmax(-1), 2.0)
    if kind == "few":
        return row.masked_fill(torch.rand(row.shape, generator=generator) < 0.9, -math.inf)
    return {
        "equal": torch.zeros_like(row),
        "both zeros": torch.where(row > 0, 0.0, -0.0),
        "two levels": (row > 0.5).float(),
        "steps": (3 * row).round() / 2,
        "wide": 1e3 * row,
        "huge": 3e38 * row.clamp(-1, 1),
        "tiny": 1e-40 * row,
        "far": row - 1e6,
        "nothing": torch.full_like(row, -math.inf),
        "not finite": logits_of(seed, 2, size, 3.0)[1:],
        "peaked": 10 * row,
        "plain": 2 * row,
    }[kind]


KINDS = [
    "one-hot", "few", "equal", "both zeros", "two levels", "steps", "wide", "huge", "tiny", "far",
    "nothing", "not finite", "peaked", "plain",
]  # fmt: skip


@pytest.mark.long
@settings(
    max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
@given(
    st.integers(0, 10**6),
    st.sampled_from(KINDS),
    options,
    st.sampled_from([1, 2, 17, 100, 700, 5000]),
    st.sampled_from([16, 256, 4096]),
    st.sampled_from(list(Purpose)),
)
def test_sets_and_tokens_are_the_references(
    poisoned_empty: None,
    seed: int,
    kind: str,
    values: dict[str, float],
    size: int,
    block: int,
    purpose: Purpose,
) -> None:
    rows, logits = rows_of([values]), adversarial(kind, seed, size)
    random = streams(1, seed=seed)
    block = max(block, size // 16)
    tokens, found = draw_triton(logits, rows, *random, purpose, block=1 << (block - 1).bit_length())
    expected = draw(logits, rows, *random, purpose, impl="torch")
    scaled = process(logits, SamplingRows.of([values["temperature"]]), impl="torch")
    fewest, most = (kept_in_float64(scaled[0], rows, off) for off in (OFF, -OFF))
    kept = found[0] > -math.inf
    assert (kept | ~fewest).all() and (most | ~kept).all()
    assert torch.equal(found[0, kept], scaled[0, kept])
    if torch.equal(fewest, most):
        assert torch.equal(found, expected.logits)
        assert tokens.tolist() == expected.tokens.tolist()


def tied() -> tuple[torch.Tensor, SamplingRows]:
    """A row whose set ends within a tie."""
    generator = torch.Generator().manual_seed(3)
    return torch.randint(0, 4, (1, 90), generator=generator).float(), SamplingRows.of(
        [1.0], top_p=[0.4]
    )


def test_of_equal_tokens_those_of_the_highest_ids_stay() -> None:
    logits, rows = tied()
    found = process(logits, rows, impl="triton")
    assert torch.equal(found, process(logits, rows, impl="torch"))
    lowest = process(logits.flip(-1), rows, impl="torch").flip(-1)
    assert int((found > -math.inf).sum()) == int((lowest > -math.inf).sum())
    assert not torch.equal(found, lowest), "the other rule must be another set"


@pytest.mark.parametrize(
    ("values", "kept"),
    [
        ({"top_p": [0.0]}, 1),
        ({"top_p": [1.0]}, 64),
        ({"top_p": [0.5]}, 32),
        ({"top_k": [1]}, 64),
        ({"min_p": [1.0]}, 64),
        ({"top_k": [10], "top_p": [0.25], "min_p": [1.0]}, 16),
    ],
)
def test_equal_tokens_are_counted(values: dict[str, Any], kept: int) -> None:
    rows = SamplingRows.of([1.0], **values)
    found = process(torch.zeros(1, 64), rows, impl="triton")
    assert torch.equal(found, process(torch.zeros(1, 64), rows, impl="torch"))
    assert int((found > -math.inf).sum()) == kept


def test_tokens_that_a_bound_rules_out_have_their_mass() -> None:
    """4,000 tokens too unlikely to be the cut have together three fifths of what is removed."""
    logits = torch.full((1, 4096), -10.7)
    logits[0, ::41] = -4.0
    logits[0, 20 * 41 :: 41] = -math.inf
    logits[0, 7] = 0.0
    rows = SamplingRows.of([1.0], top_p=[0.9])
    found = process(logits, rows, impl="triton")
    assert torch.equal(found, process(logits, rows, impl="torch"))
    assert int((found > -math.inf).sum()) == 18


def mixed(num_rows: int, size: int) -> tuple[torch.Tensor, SamplingRows]:
    values = [
        {"temperature": 0.7, "top_k": 0, "top_p": 0.9, "min_p": 0.0},
        {"temperature": 0.0, "top_k": 5, "top_p": 0.5, "min_p": 0.1},
        {"temperature": 1.3, "top_k": 20, "top_p": 1.0, "min_p": 0.0},
        {"temperature": 1.0, "top_k": 0, "top_p": 1.0, "min_p": 0.0},
        {"temperature": 1.0, "top_k": 40, "top_p": 0.8, "min_p": 0.05},
        {"temperature": 0.4, "top_k": 0, "top_p": 1.0, "min_p": 0.2},
    ]
    rows = rows_of([values[row % len(values)] for row in range(num_rows)])
    return logits_of(7, num_rows, size, 2.0), rows


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_mixed_batch_is_the_reference(
    dtype: torch.dtype, device: torch.device, poisoned_empty: None
) -> None:
    logits, rows = mixed(6, 333)
    # Rows that lie apart, as a part of a batch does.
    apart = logits.to(device, dtype)[:, None].expand(-1, 2, -1).contiguous()[:, 1]
    rows = SamplingRows(*(option.to(device) for option in rows.options), rows.passes)
    random = [part.to(device) for part in streams(6)]
    found = draw(apart, rows, *random, Purpose.DRAFT, impl="triton")
    expected = draw(apart, rows, *random, Purpose.DRAFT, impl="torch")
    assert found.tokens.tolist() == expected.tokens.tolist()
    assert torch.equal(found.logits, expected.logits)
    assert torch.equal(process(apart, rows, impl="triton"), expected.logits)


def test_no_rows() -> None:
    rows = SamplingRows.of([], top_p=[])
    found = draw(torch.empty(0, 30), rows, *streams(0), Purpose.DRAFT, impl="triton")
    assert found.tokens.shape == (0,) and found.logits.shape == (0, 30)


@pytest.mark.parametrize("size", [3, 300, 5000])
def test_several_tokens_are_the_references(size: int, poisoned_empty: None) -> None:
    rows = SamplingRows.of([0.7] * 4, top_k=[0, 2, 20, 0])
    processed = process(adversarial("plain", 5, 4 * size).view(4, size), rows)
    processed[3] = -math.inf
    found, expected = (
        draw_several(processed, *streams(4), Purpose.DRAFT, 5, impl=impl)
        for impl in ("triton", "torch")
    )
    assert found.tolist() == expected.tolist()
    one = draw(processed, SamplingRows.of([1.0] * 4), *streams(4), Purpose.DRAFT, impl="triton")
    assert found[:, 0].tolist() == one.tokens.tolist()


def test_triton_where_it_cannot_run_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TRITON_INTERPRET", "0")
    logits, rows = torch.zeros(1, 8), SamplingRows.of([1.0])
    with pytest.raises(UserError, match="impl 'triton' cannot run"):
        draw(logits, rows, *streams(1), Purpose.DRAFT, impl="triton")
    with pytest.raises(UserError, match="impl 'triton' cannot run"):
        process(logits, rows, impl="triton")


@pytest.mark.gpu
@pytest.mark.parametrize("size", [32_000, 128_256, 151_936])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_real_vocabularies_on_a_device(size: int, dtype: torch.dtype, poisoned_empty: None) -> None:
    cuda = torch.device("cuda")
    logits, rows = mixed(48, size)
    rows = SamplingRows(*(option.to(cuda) for option in rows.options), rows.passes)
    arguments = logits.to(cuda, dtype), rows, *(part.to(cuda) for part in streams(48))
    found, expected = (draw(*arguments, Purpose.BONUS, impl=impl) for impl in ("triton", "torch"))
    # A token within float32 rounding of the end of a set may fall on either side.
    differ = ((found.logits > -math.inf) != (expected.logits > -math.inf)).sum(-1)
    assert int(differ.max()) <= 2
    assert int((found.tokens != expected.tokens).sum()) <= 1


@pytest.mark.gpu
def test_a_graph_holds_a_draw() -> None:
    cuda = torch.device("cuda")
    logits, rows = mixed(12, 32_000)
    rows = SamplingRows(*(option.to(cuda) for option in rows.options), rows.passes)
    buffer, random = logits.to(cuda), [part.to(cuda) for part in streams(12)]
    draw(buffer, rows, *random, Purpose.DRAFT)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = draw(buffer, rows, *random, Purpose.DRAFT)
    for shift in (0, 100):
        buffer.copy_(logits.roll(shift, dims=-1))
        graph.replay()
        again = draw(buffer, rows, *random, Purpose.DRAFT)
        assert torch.equal(captured.tokens, again.tokens)
        assert torch.equal(captured.logits, again.logits)
