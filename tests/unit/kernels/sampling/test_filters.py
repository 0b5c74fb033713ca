from __future__ import annotations

import itertools
import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers.generation.logits_process import (
    MinPLogitsWarper,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
)

from draftsmith.kernels.sampling import filters
from draftsmith.kernels.sampling.filters import SamplingRows, process

CASES = list(
    itertools.product([0.3, 1.0, 1.7], [0, 1, 5, 1000], [1.0, 0.9, 0.3, 0.0], [0.0, 0.05, 1.0])
)


def warped(
    row: torch.Tensor, temperature: float, top_k: int, top_p: float, min_p: float
) -> torch.Tensor:
    """transformers' own sampling pipeline on one row [1, V], in the order of `GenerationMixin`."""
    row = TemperatureLogitsWarper(temperature)(None, row)
    row = TopKLogitsWarper(top_k)(None, row) if top_k else row
    row = TopPLogitsWarper(top_p)(None, row) if top_p < 1 else row
    return MinPLogitsWarper(min_p)(None, row) if min_p else row


@pytest.mark.parametrize("spread", [0.5, 4.0])
def test_a_mixed_batch_is_transformers_row_by_row(spread: float) -> None:
    temperature, top_k, top_p, min_p = zip(*CASES)
    logits = spread * torch.randn(len(CASES), 301, generator=torch.Generator().manual_seed(0))
    processed = process(logits, SamplingRows.of(temperature, top_k=top_k, top_p=top_p, min_p=min_p))
    for index, case in enumerate(CASES):
        assert torch.equal(
            processed[index : index + 1], warped(logits[index : index + 1], *case)
        ), case
    kept = (processed > -math.inf).sum(-1)
    assert kept.min() == 1 and kept.max() == 301, "the cases must reach from one kept token to all"


@pytest.mark.parametrize("spread", [0.01, 1.0, 4.0])
@pytest.mark.parametrize("top_p", [0.1, 0.9, 0.999])
def test_top_p_of_a_large_vocabulary_is_transformers(spread: float, top_p: float) -> None:
    """Peaked rows are decided by their likeliest tokens, flat ones by an order of all, and both
    stand in one batch."""
    logits = torch.tensor([[spread], [3.0]] * 3) * torch.randn(
        6, 5000, generator=torch.Generator().manual_seed(4)
    )
    processed = process(logits, SamplingRows.of([1.0] * 6, top_p=[top_p] * 6))
    for index in range(6):
        assert torch.equal(
            processed[index : index + 1], warped(logits[index : index + 1], 1.0, 0, top_p, 0.0)
        )


@pytest.mark.parametrize(
    "above, tied, size",
    [(3, 8, 40), (3, 8, 2000), (60, 50, 2000), (filters.HEAD - 4, 8, 2000), (0, 900, 2000)],
)
def test_top_p_ends_within_a_tie(above: int, tied: int, size: int) -> None:
    """Which of equal tokens stay is a matter of order; how many is not. Sets smaller and larger
    than the head, and at its end."""
    generator = torch.Generator().manual_seed(5)
    levels = torch.tensor([3.0] * above + [2.0] * tied + [-2.0] * (size - above - tied))
    logits = torch.stack([levels[torch.randperm(size, generator=generator)] for _ in range(4)])
    probs = levels.softmax(-1)
    shares = [0.2, 0.45, 0.7, 0.8]  # of the tied tokens, that the set is to keep
    top_p = [
        float(probs[:above].sum() + share * probs[above : above + tied].sum()) for share in shares
    ]
    processed = process(logits, SamplingRows.of([1.0] * 4, top_p=top_p))
    for index in range(4):
        theirs = warped(logits[index : index + 1], 1.0, 0, top_p[index], 0.0)
        assert torch.equal(processed[index].sort().values, theirs[0].sort().values)
        kept = int((processed[index] > -math.inf).sum())
        assert above < kept < above + tied, "the set must end within the tie"


def test_greedy_is_one_hot_at_the_lowest_of_the_best() -> None:
    logits = torch.tensor([[1.0, 3.0, 3.0, 2.0], [0.0, 1.0, 2.0, 3.0]])
    processed = process(logits, SamplingRows.of([0.0, 1.0], top_k=[2, 0]))
    assert processed[0].tolist() == [-math.inf, 0.0, -math.inf, -math.inf]
    assert torch.equal(processed[1], logits[1])
    assert torch.equal(process(logits[:1], SamplingRows.of([0.0]))[0], processed[0])


def test_not_a_number_is_no_mass_and_infinity_is_all_of_it() -> None:
    logits = torch.tensor(
        [[math.nan, 1.0, 2.0], [math.inf, 0.0, math.inf], [math.nan, math.nan, math.nan]]
    )
    for temperature in (0.0, 0.5, 1.0):
        processed = process(logits, SamplingRows.of([temperature] * 3, top_p=[0.99] * 3))
        assert not processed.isnan().any() and not (processed == math.inf).any()
        assert processed[0, 0] == -math.inf
        assert (processed[2] == -math.inf).all()
    probs = process(logits, SamplingRows.of([0.5] * 3)).softmax(-1)
    assert probs[0, 0] == 0 and probs[1].tolist() == [0.5, 0.0, 0.5]


def test_input_is_left_alone() -> None:
    logits = torch.randn(3, 20, generator=torch.Generator().manual_seed(3))
    before = logits.clone()
    process(logits, SamplingRows.of([0.0, 1.0, 0.5], top_k=[0, 3, 0], top_p=[1.0, 1.0, 0.5]))
    assert torch.equal(logits, before)


@settings(max_examples=60, deadline=None)
@given(
    logits=st.lists(
        st.one_of(st.floats(-50, 50, width=32), st.sampled_from([math.nan, math.inf, -math.inf])),
        min_size=1,
        max_size=12,
    ),
    temperature=st.one_of(st.just(0.0), st.floats(1e-6, 100)),
    top_k=st.integers(0, 20),
    top_p=st.floats(0, 1),
    min_p=st.floats(0, 1),
)
def test_a_distribution_remains(
    logits: list[float], temperature: float, top_k: int, top_p: float, min_p: float
) -> None:
    row = torch.tensor([logits], dtype=torch.float32)
    processed = process(
        row, SamplingRows.of([temperature], top_k=[top_k], top_p=[top_p], min_p=[min_p])
    )
    cleaned = torch.nan_to_num(row, nan=-math.inf, posinf=3e38, neginf=-math.inf)
    assert not processed.isnan().any()
    assert (processed[cleaned == -math.inf] == -math.inf).all()
    if cleaned.max() > -math.inf:
        assert (processed[cleaned == cleaned.max()] > -math.inf).any(), (
            "one of the likeliest tokens stays"
        )
        assert processed.softmax(-1).sum().item() == pytest.approx(1, abs=1e-5)


@pytest.mark.parametrize(
    "options, message",
    [
        ({"temperature": [-1.0]}, "temperature is -1.0"),
        ({"temperature": [math.nan]}, "temperature is nan"),
        ({"temperature": [1e-9]}, "temperature is 1e-09"),
        ({"temperature": [1.0], "top_k": [-1]}, "top_k is -1"),
        ({"temperature": [1.0], "top_p": [1.5]}, "top_p is 1.5"),
        ({"temperature": [1.0], "min_p": [math.nan]}, "min_p is nan"),
    ],
)
def test_bad_values_are_named(options: dict, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        SamplingRows.of(options.pop("temperature"), **options)


@pytest.mark.parametrize("size", [97, 700])
def test_without_looking_at_values_the_distributions_are_the_same(
    size: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On an accelerator nothing is read back: every filter runs over the whole batch and leaves the
    rows without it alone."""
    temperature, top_k, top_p, min_p = zip(*CASES, (0.0, 3, 0.9, 0.1))
    rows = SamplingRows.of(temperature, top_k=top_k, top_p=top_p, min_p=min_p)
    logits = 2 * torch.randn(len(temperature), size, generator=torch.Generator().manual_seed(6))
    looked = process(logits, rows)
    monkeypatch.setattr(filters, "reads_freely", lambda device: False)
    assert torch.equal(process(logits, rows), looked)
