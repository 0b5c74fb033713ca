from __future__ import annotations

import math

import pytest
import torch

from draftsmith.kernels.sampling import random_streams
from draftsmith.kernels.sampling.random_streams import (
    FEW,
    GOLDEN,
    Purpose,
    _kernel,
    _mix_,
    _token_offsets,
    _unit_interval,
    round_seeds,
    sample,
    sample_without_replacement,
    stream_keys,
    token_noise,
    uniform,
)
from draftsmith.kernels.statistics import Fit
from tests.goodness import g_test

COUNT = 20_000
FALSE_ALARM = 1e-6  # of each test below; their seeds are fixed, so that they pass or fail for good


def uniformity(values: torch.Tensor, *, bins: int = 64) -> Fit:
    """G-test of values in [0, 1] against the uniform distribution."""
    counts = torch.bincount((values * bins).long().clamp(0, bins - 1), minlength=bins)
    return g_test(counts, torch.full((bins,), 1 / bins, dtype=torch.float64))


def together(first: torch.Tensor, second: torch.Tensor) -> float:
    """P-value of pairs of values in [0, 1] being spread evenly over a square."""
    cells = (first * 8).long() * 8 + (second * 8).long()
    return g_test(torch.bincount(cells, minlength=64), torch.full((64,), 1 / 64)).p_value


def test_uniformity() -> None:
    generator = torch.Generator().manual_seed(2)
    values = torch.rand(20000, generator=generator, dtype=torch.float64)
    assert uniformity(values).p_value > 1e-3
    assert uniformity(values**1.1).p_value < 1e-9


def grid(seed_step: int, position_step: int) -> tuple[torch.Tensor, torch.Tensor]:
    indices = torch.arange(COUNT)
    return 7 + indices * seed_step, 100 + indices * position_step


def splitmix(x: int) -> int:
    """The published finaliser, in Python's whole numbers."""
    mask = (1 << 64) - 1
    x &= mask
    x = ((x ^ (x >> 30)) * 0xBF58476D1CE4E5B9) & mask
    x = ((x ^ (x >> 27)) * 0x94D049BB133111EB) & mask
    return x ^ (x >> 31)


@pytest.mark.parametrize("repeats", [1, FEW])
def test_bits_are_the_published_hash(repeats: int) -> None:
    """Few rows are hashed one by one, many as tensors."""
    seeds = torch.tensor([0, 1, -5, 2**63 - 1, -(2**63)]).repeat(repeats)
    positions = torch.tensor([0, 9, 3, 100_000, 2**31]).repeat(repeats)
    golden = 0x9E3779B97F4A7C15
    for purpose in Purpose:
        keys, draws = stream_keys(seeds, positions, purpose), uniform(seeds, positions, purpose)
        for seed, position, key, draw in zip(
            seeds.tolist(), positions.tolist(), keys.tolist(), draws.tolist()
        ):
            expected = splitmix(splitmix(seed + golden) + (position * 8 + purpose) * golden)
            assert key % 2**64 == expected
            assert draw == ((splitmix(expected) >> 12) + 0.5) / 2**52


def test_positions_and_purposes_share_no_stream() -> None:
    """What is drawn at one position for one purpose is drawn again nowhere."""
    positions = torch.arange(100)
    keys = torch.cat([stream_keys(torch.tensor([7]), positions, purpose) for purpose in Purpose])
    assert len(keys.unique()) == 100 * len(Purpose)


@pytest.mark.parametrize(
    "seed_step, position_step", [(0, 1), (1, 0), (1, 1), (2**32, 0), (-(2**40), 3)]
)
@pytest.mark.parametrize("purpose", list(Purpose))
def test_uniform_along_seeds_and_positions(
    seed_step: int, position_step: int, purpose: Purpose
) -> None:
    draws = uniform(*grid(seed_step, position_step), purpose)
    assert draws.dtype == torch.float64 and draws.min() > 0 and draws.max() < 1
    assert uniformity(draws).p_value > FALSE_ALARM
    assert together(draws[:-1], draws[1:]) > FALSE_ALARM


@pytest.mark.parametrize("first, second", [(a, b) for a in Purpose for b in Purpose if a < b])
def test_purposes_are_independent(first: Purpose, second: Purpose) -> None:
    seeds, positions = grid(3, 1)
    draws = [uniform(seeds, positions, purpose) for purpose in (first, second)]
    assert together(*draws) > FALSE_ALARM > together(draws[0], draws[0])


@pytest.mark.parametrize("purpose", [Purpose.DRAFT, Purpose.BONUS])
def test_a_token_draw_does_not_know_the_accept_draw_of_its_position(purpose: Purpose) -> None:
    seeds, positions = grid(1, 1)
    logits = torch.tensor([[0.0, 1.0, 0.5, -1.0]])
    ids = sample(logits.expand(COUNT, 4), seeds, positions, purpose)
    cells = ids * 8 + (uniform(seeds, positions, Purpose.ACCEPT) * 8).long()
    distribution = logits.softmax(-1).view(4, 1).expand(4, 8) / 8
    assert g_test(torch.bincount(cells, minlength=32), distribution).p_value > FALSE_ALARM


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("num_tokens", [2, 17, 300])
def test_samples_follow_the_distribution(num_tokens: int, dtype: torch.dtype) -> None:
    generator = torch.Generator().manual_seed(num_tokens)
    logits = 2 * torch.randn(1, num_tokens, generator=generator, dtype=dtype)
    logits[0, 1] = -math.inf
    seeds, positions = grid(0, 1)
    ids = sample(logits.expand(COUNT, num_tokens), seeds, positions, Purpose.DRAFT)
    assert (
        g_test(torch.bincount(ids, minlength=num_tokens), logits.softmax(-1)).p_value > FALSE_ALARM
    )
    warmer = (logits / 1.2).softmax(-1)
    if num_tokens > 2:
        assert g_test(torch.bincount(ids, minlength=num_tokens), warmer).p_value < FALSE_ALARM


def test_noise_is_exponential_down_to_its_smallest_values() -> None:
    """The winner has a small E, so the small end is tested on its own scale: min of 1000 has rate
    1000."""
    keys = stream_keys(*grid(1, 0), Purpose.RESIDUAL)[:20_000]
    offsets = torch.arange(1, 1001) * GOLDEN
    smallest = token_noise(keys[:, None], offsets, torch.float32).exp().min(dim=-1).values.double()
    assert uniformity(1 - (-1000 * smallest).exp()).p_value > FALSE_ALARM
    # float32 itself makes some twenty pairs equal; a 24-bit uniform would leave 16,000 values near
    # 1 / 1000.
    assert len(smallest.unique()) > 19_900


def test_one_hot_and_empty_rows() -> None:
    logits = torch.full((3, 5), -math.inf)
    logits[0, 3], logits[1, 0] = 0.0, -3e38
    seeds, positions = torch.arange(3), torch.arange(3)
    assert sample(logits, seeds, positions, Purpose.DRAFT).tolist() == [3, 0, -1]


def test_a_row_does_not_depend_on_its_batch() -> None:
    seeds, positions = (
        torch.randint(2**62, (50,), generator=torch.Generator().manual_seed(0)),
        torch.arange(50),
    )
    logits = torch.randn(50, 33, generator=torch.Generator().manual_seed(1))
    assert len(seeds) > FEW
    together = sample(logits, seeds, positions, Purpose.BONUS)
    alone = [
        sample(logits[i : i + 1], seeds[i : i + 1], positions[i : i + 1], Purpose.BONUS).item()
        for i in range(50)
    ]
    assert together.tolist() == alone


def test_noise_is_made_only_where_there_is_mass_and_is_the_same(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(random_streams, "SMALL", 0)
    logits = torch.randn(40, 64, generator=torch.Generator().manual_seed(2))
    seeds, positions = torch.arange(40), torch.arange(40)
    full = sample(logits, seeds, positions, Purpose.DRAFT)
    filtered = torch.full_like(logits, -math.inf)
    filtered[torch.arange(40), full] = logits[torch.arange(40), full]
    filtered[:, 5:9] = logits[:, 5:9]
    assert torch.equal(sample(filtered, seeds, positions, Purpose.DRAFT), full), (
        "fewer rivals leave the winner the winner"
    )


needs_compiler = pytest.mark.skipif(_kernel() is None, reason="there is no C++ compiler")


@needs_compiler
@pytest.mark.parametrize("num_tokens", [1, 7, 4096, 50_001])
def test_the_compiled_kernel_gives_the_bits_of_torch(num_tokens: int) -> None:
    keys = torch.randint(-(2**63), 2**63 - 1, (9,), generator=torch.Generator().manual_seed(4))
    keys[:3] = torch.tensor([0, -1, 2**63 - 1])
    offsets = _token_offsets(num_tokens, keys.device)
    found = random_streams.uniforms_compiled(keys, num_tokens, torch.float32)
    assert found is not None
    assert torch.equal(found, _unit_interval(_mix_(keys[:, None] + offsets), torch.float32))
    assert found.min() > 0 and found.max() < 1


@needs_compiler
@pytest.mark.parametrize("small", [0, 1 << 30])
def test_a_compiler_changes_no_token(small: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(random_streams, "SMALL", small)
    logits = torch.randn(64, 777, generator=torch.Generator().manual_seed(5))
    logits[1] = -math.inf
    logits[2, 5:] = -math.inf
    seeds, positions = torch.arange(64), torch.arange(64)
    drawn = sample(logits, seeds, positions, Purpose.BONUS)
    assert drawn[1] == -1 and drawn[2] < 5
    monkeypatch.setattr(random_streams, "uniforms_compiled", lambda *_: None)
    assert torch.equal(sample(logits, seeds, positions, Purpose.BONUS), drawn)


def test_numbers_continue_the_published_sequence_and_are_independent() -> None:
    seeds, positions = grid(1, 3)
    first = stream_keys(seeds[:1], positions[:1], Purpose.ACCEPT).item()
    for number in range(4):
        expected = ((splitmix(first + number * 0x9E3779B97F4A7C15) >> 12) + 0.5) / 2**52
        assert (
            uniform(seeds[:1], positions[:1], Purpose.ACCEPT, torch.tensor(number)).item()
            == expected
        )
    draws = uniform(seeds[:, None], positions[:, None], Purpose.ACCEPT, torch.arange(4))
    assert torch.equal(draws[:, 0], uniform(seeds, positions, Purpose.ACCEPT))
    for number in range(1, 4):
        assert uniformity(draws[:, number]).p_value > FALSE_ALARM
        assert together(draws[:, 0], draws[:, number]) > FALSE_ALARM


def test_without_replacement_is_drawing_one_after_the_other() -> None:
    logits = torch.tensor([[0.0, 1.0, -math.inf, 0.5, -1.0]]).expand(COUNT, 5)
    seeds, positions = grid(1, 0)
    ids = sample_without_replacement(logits, seeds, positions, Purpose.DRAFT, 3)
    assert torch.equal(ids[:, 0], sample(logits, seeds, positions, Purpose.DRAFT))
    distribution, with_replacement = torch.zeros(5, 5, 5), torch.zeros(5, 5, 5)
    probs = logits[0].softmax(-1)
    for a, b, c in torch.cartesian_prod(*[torch.arange(5)] * 3).tolist():
        if len({a, b, c}) == 3:
            distribution[a, b, c] = (
                probs[a] * probs[b] / (1 - probs[a]) * probs[c] / (1 - probs[a] - probs[b])
                if 2 not in (a, b, c)
                else 0
            )
            with_replacement[a, b, c] = probs[a] * probs[b] * probs[c]
    counts = torch.bincount(ids[:, 0] * 25 + ids[:, 1] * 5 + ids[:, 2], minlength=125)
    assert g_test(counts, distribution.flatten()).p_value > FALSE_ALARM
    assert g_test(counts, with_replacement.flatten()).p_value < FALSE_ALARM


def test_without_replacement_ends_with_the_mass() -> None:
    logits = torch.full((3, 6), -math.inf)
    logits[0, [1, 4]], logits[1] = 0.0, torch.arange(6.0)
    ids = sample_without_replacement(logits, torch.arange(3), torch.arange(3), Purpose.DRAFT, 8)
    assert sorted(ids[0, :2].tolist()) == [1, 4] and ids[0, 2:].tolist() == [-1] * 6
    assert (
        sorted(ids[1, :6].tolist()) == list(range(6))
        and ids[1, 6:].tolist() == [-1, -1]
        and ids[2].tolist() == [-1] * 8
    )


def test_the_seed_of_a_round_shares_nothing_with_the_requests_streams() -> None:
    seeds, positions = grid(1, 1)
    rounds = round_seeds(seeds, positions)
    assert len(rounds.unique()) == len(round_seeds(seeds[:1], positions).unique()) == COUNT
    for purpose in (Purpose.DRAFT, Purpose.ACCEPT):
        own, fresh = uniform(seeds, positions, purpose), uniform(rounds, positions, purpose)
        assert together(own, fresh) > FALSE_ALARM
