from __future__ import annotations

import pytest
import scipy.stats
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from draftsmith.kernels.statistics import detectable_bias, g_test, homogeneity


def test_statistics_are_scipys() -> None:
    counts, probs = torch.tensor([30, 50, 20, 100]), torch.tensor([0.2, 0.2, 0.1, 0.5])
    expected = (probs * 200).tolist()
    ours = g_test(counts, probs)
    theirs = scipy.stats.power_divergence(counts.tolist(), expected, lambda_="log-likelihood")
    assert (ours.statistic, ours.p_value) == pytest.approx(
        (theirs.statistic, theirs.pvalue), rel=1e-6
    )


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
