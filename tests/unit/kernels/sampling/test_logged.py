"""Distributions of records by the compiled kernel, against float64 and against plain torch."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch

from draftsmith.kernels.host_compiler import DTYPES
from draftsmith.kernels.sampling import logged
from draftsmith.kernels.sampling.logged import prob_arrays
from draftsmith.record import ProbArrays

compiler = pytest.mark.skipif(
    logged.prob_arrays_compiled(torch.zeros(1, 1), [0], None) is None,
    reason="there is no C++ compiler",
)
STEP = 1 / 1024  # of a stored logprob, in nats


def logits_of(num_tokens: int, *, rows: int = 6, seed: int = 0) -> torch.Tensor:
    return 4 * torch.randn(rows, num_tokens, generator=torch.Generator().manual_seed(seed))


def compiled(logits: torch.Tensor, tokens: list[int], temperatures: list[float]) -> ProbArrays:
    found = logged.prob_arrays_compiled(logits, tokens, temperatures)
    assert found is not None
    return found


def check(found: ProbArrays, logits: torch.Tensor, tokens: list[int], temperatures: list[float]):
    """Against float64: equal up to a hundredth of a stored step, ties by the smaller token."""
    wide = logits.double()
    logprobs = torch.log_softmax(wide, dim=-1)
    kept = min(64, logits.shape[1])
    order = np.argsort(-wide.numpy(), axis=-1, kind="stable")[:, :kept]
    np.testing.assert_array_equal(found.ids, order)
    close = {"rtol": 1e-6, "atol": STEP / 100}
    expected = logprobs.gather(-1, torch.from_numpy(order)).numpy()
    np.testing.assert_allclose(found.logprobs, expected, **close)
    np.testing.assert_allclose(found.tail, 1 - np.exp(expected).sum(-1), rtol=0, atol=2e-6)
    drafted = logprobs[range(len(tokens)), [max(0, token) for token in tokens]]
    assert found.drafted is not None
    np.testing.assert_allclose(found.drafted, drafted, **close)
    for row, temperature in enumerate(temperatures):
        norm = float(torch.logsumexp(logprobs[row] / (temperature or 1.0), dim=-1))
        norm = norm if temperature not in (0.0, 1.0) else 0.0
        assert found.log_norms[row] == pytest.approx(norm, abs=STEP / 100)


@compiler
@pytest.mark.parametrize("dtype", list(DTYPES))
@pytest.mark.parametrize("num_tokens", [1, 7, 63, 64, 65, 128, 300, 1024, 4001, 32_007])
def test_the_compiled_distributions_are_those_of_float64(
    num_tokens: int, dtype: torch.dtype
) -> None:
    logits = logits_of(num_tokens)
    logits[1] = logits[1].sort().values
    logits[2] = logits[2].sort(descending=True).values
    logits[3] = logits[3].round()  # many are equal
    logits[4] = 0.5  # all are
    logits[5, 5:] = -math.inf
    logits = logits.to(dtype)
    tokens = [0, -1, *[number % num_tokens for number in (3, 60, 4000, 2)]]
    temperatures = [0.0, 1.0, 0.7, 1.5, 0.3, 0.7]
    check(compiled(logits, tokens, temperatures), logits, tokens, temperatures)


@compiler
def test_likeliest_tokens_of_one_group_and_equal_ones_beyond_all_room() -> None:
    """Groups of 128 tokens apart give the threshold, and candidates have room for 512."""
    logits = logits_of(40_000, rows=4).clamp(max=9.0)
    logits[0, 5::128] += 50.0
    logits[1, 7::128] = 30.0  # 313 equal ones
    logits[2] = torch.arange(40_000) % 63 * 1.0
    logits[3, 39_900:] += 40.0
    check(compiled(logits, [0, 7, 5, 9], [1.0] * 4), logits, [0, 7, 5, 9], [1.0] * 4)


@compiler
@pytest.mark.parametrize("broken", [math.nan, math.inf, -math.inf])
def test_nothing_is_known_of_a_row_that_is_no_distribution(
    broken: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    logits = logits_of(300, rows=3)
    logits[1, 17:18] = broken
    if broken < 0:
        logits[1] = broken
    tokens, temperatures = [3, 4, 5], [0.7, 0.7, 1.0]
    found = compiled(logits, tokens, temperatures)
    monkeypatch.setattr(logged, "_kernel", lambda dtype: None)
    expected = prob_arrays(logits, tokens, temperatures)
    for name, values in found._asdict().items():
        theirs = getattr(expected, name)
        if name == "ids":
            values, theirs = values[[0, 2]], theirs[[0, 2]]
        np.testing.assert_allclose(values, theirs, rtol=1e-6, atol=2e-6, err_msg=name)
    assert np.isnan(found.logprobs[1]).all() and np.isnan(found.tail[1])
    assert np.isfinite(found.logprobs[[0, 2]]).all()


@compiler
def test_a_row_depends_on_no_other_and_lies_anywhere_in_its_table() -> None:
    table = torch.cat([logits_of(500), torch.full((6, 12), math.inf)], dim=1)[:, :500]
    tokens, temperatures = [1, 2, 3, 4, 5, 6], [0.7] * 6
    together = compiled(table, tokens, temperatures)
    check(together, table, tokens, temperatures)
    for row in range(6):
        alone = compiled(table[row : row + 1].clone(), [row + 1], [0.7])
        for one, every in zip(alone, together):
            assert one is not None and every is not None
            np.testing.assert_array_equal(one[0], every[row])


@compiler
def test_what_the_kernel_cannot_read_is_left_to_torch() -> None:
    logits = logits_of(300)
    for other in (logits.double(), logits.half(), logits.T.contiguous().T):
        assert logged.prob_arrays_compiled(other, [0] * 6, None) is None
    assert logged.TOP <= 128, "`kGroups` of the source"
    with pytest.raises(IndexError, match="token 300 is beyond a vocabulary of 300"):
        compiled(logits[:1], [300], [1.0])
