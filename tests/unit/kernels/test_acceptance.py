from __future__ import annotations

import itertools
import math

import pytest
import torch

from draftsmith.kernels.acceptance import (
    AcceptanceCounts,
    bootstrap_ratio,
    bounds_of,
    bucket_of,
    wilson,
)
from draftsmith.kernels.overlap import expected_rounds, keep_probability, overlap


def test_overlap_by_hand() -> None:
    p = torch.tensor([[0.5, 0.5, 0.0], [1.0, 0.0, 0.0]]).log()
    q = torch.tensor([[0.2, 0.3, 0.5], [0.0, 1.0, 0.0]]).log()
    torch.testing.assert_close(overlap(p, q), torch.tensor([0.5, 0.0]))
    torch.testing.assert_close(overlap(p, p), torch.ones(2))


def test_overlap_of_no_distribution_is_zero() -> None:
    p = torch.zeros(3, 4)
    q = torch.tensor([[math.nan] * 4, [-math.inf] * 4, [0.0, math.nan, 0.0, 0.0]])
    assert overlap(p, q).tolist() == [0.0, 0.0, 0.0]


def test_keep_probability_by_hand() -> None:
    p = torch.tensor([0.5, 0.5, 0.0]).log().expand(3, 3)
    q = torch.tensor([0.1, 0.7, 0.2]).log().expand(3, 3)
    torch.testing.assert_close(
        keep_probability(p, q, torch.tensor([0, 1, 2])), torch.tensor([0.2, 1.0, 1.0])
    )
    nothing = torch.full((3, 3), -math.inf)
    assert keep_probability(p, nothing, torch.tensor([0, 1, 2])).tolist() == [0.0, 0.0, 0.0]


def test_keep_probability_averages_to_the_overlap() -> None:
    """sum_x p(x) min(1, q(x) / p(x)) = alpha: the two definitions are one."""
    generator = torch.Generator().manual_seed(0)
    p, q = torch.randn(2, 9, generator=generator, dtype=torch.float64)
    keep = keep_probability(p.expand(9, 9), q.expand(9, 9), torch.arange(9))
    torch.testing.assert_close((p.softmax(-1) * keep).sum(), overlap(p, q))


def by_enumeration(keep: list[list[float]]) -> float:
    """Mean number of rounds over every way of keeping and rejecting, walked recursively."""
    num_tokens = len(keep)

    def walk(start: int) -> float:
        if start >= num_tokens:
            return 0.0
        total, reached = 1.0, 1.0
        for depth, chance in enumerate(keep[start]):
            total += reached * (1 - chance) * walk(start + depth + 1)
            reached *= chance
        return total + reached * walk(start + len(keep[start]) + 1)

    return walk(0)


@pytest.mark.parametrize("num_tokens, depth", [(1, 1), (6, 1), (7, 3), (4, 6), (5, 0)])
def test_expected_rounds_is_the_enumeration(num_tokens: int, depth: int) -> None:
    keep = torch.rand(num_tokens, depth, generator=torch.Generator().manual_seed(depth))
    assert expected_rounds(keep) == pytest.approx(by_enumeration(keep.tolist()), rel=1e-6)


def test_expected_rounds_at_the_ends() -> None:
    assert expected_rounds(torch.ones(12, 3)) == 3
    assert expected_rounds(torch.zeros(12, 3)) == 12
    assert expected_rounds(torch.ones(0, 3)) == 0


def test_counts_condition_on_the_kept_prefix() -> None:
    counts = AcceptanceCounts()
    counts.add(offered=[3, 3, 2, 0], accepted=[3, 1, 0, 0], committed=[4, 2, 1, 1])
    assert counts.offered == [3, 2, 1]
    assert counts.accepted == [2, 1, 1]
    assert counts.alpha == [2 / 3, 1 / 2, 1.0]
    assert (counts.rounds, counts.num_committed, counts.tau) == (4, 8, 2.0)
    report = counts.to_dict()
    assert report["alpha"] == counts.alpha and report["tau"] == 2


def test_merging_is_adding_together() -> None:
    rounds = [(k, a, a + 1) for k, a in itertools.product(range(4), range(4)) if a <= k]
    together, first, second = AcceptanceCounts(), AcceptanceCounts(), AcceptanceCounts()
    together.add(*zip(*rounds))
    first.add(*zip(*rounds[:3]))
    second.add(*zip(*rounds[3:]))
    first.merge(second)
    assert first == together


def test_counts_recover_alpha_and_tau_of_simulated_rounds() -> None:
    """Two positions kept with chance 0.8 and 0.5: tau = 1 + 0.8 + 0.8 * 0.5."""
    generator = torch.Generator().manual_seed(0)
    first, second = torch.rand(2, 20_000, generator=generator)
    accepted = (first < 0.8).long() * (1 + (second < 0.5).long())
    counts = AcceptanceCounts()
    counts.add([2] * 20_000, accepted.tolist(), (accepted + 1).tolist())
    for interval, alpha in zip(counts.alpha_intervals, (0.8, 0.5)):
        assert interval.low < alpha < interval.high and interval.high - interval.low < 0.03
    assert counts.tau == pytest.approx(2.2, abs=0.03)


def test_empty_counts() -> None:
    counts = AcceptanceCounts()
    assert (counts.rounds, counts.tau, counts.alpha) == (0, None, [])


def test_an_impossible_round_is_refused() -> None:
    with pytest.raises(ValueError, match="accepted 3 of 2"):
        AcceptanceCounts().add([2], [3], [4])


def test_wilson_covers_at_its_rate() -> None:
    generator = torch.Generator().manual_seed(0)
    for rate in (0.03, 0.5, 0.95):
        successes = (torch.rand(2000, 60, generator=generator) < rate).sum(-1).tolist()
        covered = (
            sum(low <= rate <= high for low, high in (wilson(count, 60) for count in successes))
            / 2000
        )
        assert 0.92 < covered < 0.985
    assert wilson(0, 0) == (0.0, 1.0)


def test_bootstrap_ratio_covers_clustered_units() -> None:
    """Rates differ by text; an interval over rounds would be too narrow, one over texts is not."""
    covered = 0
    for trial in range(60):
        generator = torch.Generator().manual_seed(trial)
        rates = torch.rand(40, generator=generator) * 0.6 + 0.2
        kept = torch.binomial(torch.full((40,), 100.0), rates, generator=generator)
        low, high = bootstrap_ratio(kept.tolist(), [100.0] * 40, resamples=300, seed=trial)
        covered += low <= 0.5 <= high
    assert covered >= 50
    with pytest.raises(ValueError, match="0 numerators"):
        bootstrap_ratio([], [])


def test_every_context_lies_in_its_bucket_and_buckets_touch() -> None:
    for context in (0, 1, 255, 256, 511, 512, 1023, 1024, 4095, 4096, 131_072):
        begin, end = bounds_of(bucket_of(context))
        assert begin <= context < end
    assert [bounds_of(bucket)[1] for bucket in range(6)] == [
        bounds_of(bucket + 1)[0] for bucket in range(6)
    ]
