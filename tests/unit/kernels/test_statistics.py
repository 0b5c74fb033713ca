from __future__ import annotations

import itertools
import math

import pytest
import scipy.stats
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from draftsmith.kernels import statistics
from draftsmith.kernels.statistics import blocks, detectable_bias, homogeneity, log_evidence
from tests.goodness import g_test


def test_false_alarms_come_at_the_stated_rate_and_a_bias_is_seen() -> None:
    generator = torch.Generator().manual_seed(0)
    probs = torch.rand(50, generator=generator) ** 4  # many rare cells: the pool matters
    probs /= probs.sum()
    draws = torch.multinomial(probs, 400 * 2000, replacement=True, generator=generator).view(
        400, 2000
    )
    p_values = torch.tensor(
        [g_test(torch.bincount(row, minlength=50), probs).p_value for row in draws]
    )
    assert 0.02 < (p_values < 0.05).float().mean() < 0.10
    biased = torch.where(draws[0] == probs.argmax(), probs.argsort()[-2], draws[0])
    assert g_test(torch.bincount(biased, minlength=50), probs).p_value < 1e-9


def test_a_token_outside_the_distribution_is_impossible() -> None:
    assert g_test(torch.tensor([10, 1]), torch.tensor([1.0, 0.0])).p_value == 0
    assert g_test(torch.tensor([10, 0]), torch.tensor([1.0, 0.0])).p_value == 1


def test_detectable_bias_is_detected_that_often() -> None:
    """A bias of the stated size is caught about as often as promised, a tenth of it is not."""
    num_samples, cells, false_alarm = 5000, 16, 1e-4
    bias = detectable_bias(num_samples, cells - 1, false_alarm, miss=0.1)
    generator = torch.Generator().manual_seed(1)
    distribution = torch.full((cells,), 1 / cells)

    def caught(size: float) -> float:
        probs = distribution + size / (cells / 2) * torch.tensor([1.0, -1.0]).repeat(cells // 2)
        draws = torch.multinomial(
            probs, 200 * num_samples, replacement=True, generator=generator
        ).view(200, num_samples)
        return (
            sum(
                g_test(torch.bincount(row, minlength=cells), distribution).p_value < false_alarm
                for row in draws
            )
            / 200
        )

    assert caught(bias) > 0.8
    assert caught(bias / 10) < 0.05


def test_homogeneity_is_scipys_and_pools_rare_cells() -> None:
    first, second = torch.tensor([30, 50, 20, 100]), torch.tensor([90, 110, 45, 140])
    theirs = scipy.stats.chi2_contingency(torch.stack([first, second]).numpy(), correction=False)
    ours = homogeneity(first, second)
    assert (ours.statistic, ours.degrees, ours.p_value) == pytest.approx(
        (theirs.statistic, theirs.dof, theirs.pvalue)
    )
    assert ours.num_samples == 200 * 385 // 585
    rare = homogeneity(torch.tensor([6, 0, 500, 2]), torch.tensor([0, 8, 480, 1]))
    assert rare.degrees == 1, "all but the frequent cell are one"
    assert homogeneity(torch.tensor([0, 7]), torch.tensor([0, 9])).p_value == 1


def test_two_samples_of_one_distribution_are_told_from_two_distributions() -> None:
    generator = torch.Generator().manual_seed(2)
    probs = torch.rand(40, generator=generator) ** 3
    draws = torch.multinomial(probs, 400 * 3000, replacement=True, generator=generator).view(
        400, 3000
    )
    counts = [torch.bincount(row, minlength=40) for row in draws]
    p_values = torch.tensor(
        [homogeneity(*pair).p_value for pair in zip(counts[::2], counts[1::2], strict=True)]
    )
    assert 0.01 < (p_values < 0.05).float().mean() < 0.11
    other = torch.bincount(
        torch.multinomial(probs.roll(1), 3000, replacement=True, generator=generator), minlength=40
    )
    assert homogeneity(counts[0], other).p_value < 1e-9


@settings(max_examples=30, deadline=None)
@given(num_samples=st.integers(0, 10**6), degrees=st.integers(0, 2000), exponent=st.integers(1, 12))
def test_detectable_bias_is_a_total_variation_at_any_size(
    num_samples: int, degrees: int, exponent: int
) -> None:
    bias = detectable_bias(num_samples, degrees, 10.0**-exponent)
    assert 0 < bias <= 1
    assert bias == 1 or detectable_bias(4 * num_samples, degrees, 10.0**-exponent) == pytest.approx(
        bias / 2
    )
    if num_samples == 0 or degrees == 0:
        assert bias == 1, "nothing was looked at"


# Evidence


OUTCOMES, DRAWS = 3, 4
# The distributions of every draw after every text of earlier ones, as weights. Whole numbers: so
# many floats are more than the oldest hypothesis draws.
WEIGHTS = st.lists(
    st.integers(10, 1000), min_size=OUTCOMES * OUTCOMES**DRAWS, max_size=OUTCOMES * OUTCOMES**DRAWS
)


def mean_evidence(weights: list[float], wrong: list[float]) -> float:
    """The exact mean over all texts, where texts follow `weights` and are held against `wrong`."""
    true, held = tables(weights), tables(wrong)
    total = 0.0
    for text in itertools.product(range(OUTCOMES), repeat=DRAWS):
        rows = [row_of(text[:place]) for place in range(DRAWS)]
        chance = math.prod(float(true[row, token]) for row, token in zip(rows, text))
        ranks = torch.arange(OUTCOMES).expand(DRAWS, -1)
        prefixes = torch.tensor(rows)[:, None] * OUTCOMES + ranks
        total += chance * math.exp(
            log_evidence(held[rows], torch.tensor(text), [ranks, prefixes], strengths=(0.5, 4.0))
        )
    return total


def tables(weights: list[float]) -> torch.Tensor:
    table = torch.tensor(weights, dtype=torch.float64).view(-1, OUTCOMES)
    return table / table.sum(dim=1, keepdim=True)


def row_of(text: tuple[int, ...]) -> int:
    """Texts of fewer than `DRAWS` tokens, numbered."""
    row = sum(OUTCOMES**shorter for shorter in range(len(text)))
    return row + sum(token * OUTCOMES**place for place, token in enumerate(reversed(text)))


@pytest.fixture
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    """It learns from the first draw on."""
    monkeypatch.setattr(statistics, "FIRST_BLOCK", 1)
    monkeypatch.setattr(statistics, "GROWTH", 1.0)


@pytest.mark.long
@settings(max_examples=15, deadline=None)
@given(weights=WEIGHTS)
def test_the_mean_is_exactly_1_whatever_later_draws_depend_on(weights: list[float]) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(statistics, "FIRST_BLOCK", 1)
        patch.setattr(statistics, "GROWTH", 1.0)
        assert mean_evidence(weights, weights) == pytest.approx(1, abs=1e-9)


def test_the_mean_against_other_distributions_is_not_1(quick: None) -> None:
    size = OUTCOMES ** (DRAWS + 1)
    assert mean_evidence([1.0, 2.0, 3.0] * (size // 3), [3.0, 2.0, 1.0] * (size // 3)) > 1.1


def draws(
    count: int, seed: int, tilt: float = 0.0
) -> tuple[torch.Tensor, torch.Tensor, list[torch.Tensor]]:
    """Every draw has a distribution of its own; `tilt` moves probability from the likeliest outcome
    to the second."""
    generator = torch.Generator().manual_seed(seed)
    probs = (
        torch.rand(count, 8, generator=generator, dtype=torch.float64)
        .sort(dim=1, descending=True)
        .values
    )
    probs /= probs.sum(dim=1, keepdim=True)
    true = probs.clone()
    true[:, 0] -= tilt
    true[:, 1] += tilt
    drawn = torch.multinomial(true, 1, generator=generator)[:, 0]
    return probs, drawn, [torch.arange(8).expand(count, -1), torch.arange(count * 8).view(count, 8)]


def test_false_alarms_are_no_more_than_stated_and_a_bias_is_seen() -> None:
    logs = torch.tensor([log_evidence(*draws(300, seed)) for seed in range(300)])
    assert (logs >= math.log(10)).float().mean() < 0.1
    assert log_evidence(*draws(3000, 0, tilt=0.1)) > math.log(1e9), (
        "no two draws have one distribution"
    )


def test_what_has_no_probability_is_impossible() -> None:
    probs = torch.tensor([[1.0, 0.0]], dtype=torch.float64)
    cells = [torch.tensor([[0, 1]])]
    assert log_evidence(probs, torch.tensor([1]), cells) == math.inf
    assert log_evidence(probs, torch.tensor([0]), cells) == 0
    assert log_evidence(probs[:0], torch.tensor([], dtype=torch.int64), cells) == 0


@pytest.mark.parametrize("count", [0, 1, 15, 16, 17, 1000])
def test_blocks_cover_every_draw_once(count: int) -> None:
    assert [index for part in blocks(count) for index in range(count)[part]] == list(range(count))
