"""alpha by logged distributions alone: exact where a filter cuts inside what is logged, bounded
elsewhere."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest
import torch

from draftsmith.distill.gate.logged import LoggedPosition, logged_alpha, logged_arrays, sampled_top
from draftsmith.kernels.overlap import overlap, probabilities
from draftsmith.kernels.sampling.filters import SamplingRows, process
from draftsmith.record import Distributions, RoundRecord
from tests.round_records import each, logged, of_logits, round_record

VOCAB = 300


def record(
    logits: torch.Tensor, temperature: float, top_k: int, top_p: float, min_p: float
) -> RoundRecord:
    (distribution,) = each(of_logits(logits[None], 64))
    norm = (
        0.0
        if temperature in (0.0, 1.0)
        else float(torch.logsumexp(logits.log_softmax(-1) / temperature, 0))
    )
    return round_record(
        temperature=temperature, top_k=top_k, top_p=top_p, min_p=min_p, drafted=[1],
        committed=[1], p=logged(dataclasses.replace(distribution, log_norm=norm)),
    )  # fmt: skip


def both(sharpness: float, *sampling: float) -> tuple[torch.Tensor, torch.Tensor]:
    """alpha of 40 distributions from the whole of p, and its bounds from the logs."""
    generator = torch.Generator().manual_seed(0)
    p = sharpness * torch.randn(40, VOCAB, generator=generator)
    q = p + torch.randn(40, VOCAB, generator=generator)
    temperature, top_k, top_p, min_p = sampling
    rows = SamplingRows.of(
        [temperature] * 40, top_k=[int(top_k)] * 40, top_p=[top_p] * 40, min_p=[min_p] * 40
    )
    q_logits = process(q, rows)
    records = [LoggedPosition(record(one, temperature, int(top_k), top_p, min_p), 0) for one in p]
    sampled = sampled_top(records, logged_arrays(records))
    return overlap(process(p, rows), q_logits), logged_alpha(sampled, probabilities(q_logits))


@pytest.mark.parametrize(
    "sampling",
    [
        (0.0, 0, 1.0, 0.0),
        (1.0, 20, 1.0, 0.0),
        (0.7, 0, 0.8, 0.0),
        (1.0, 0, 1.0, 0.2),
        (0.8, 40, 0.9, 0.05),
        (1.3, 10, 0.5, 0.0),
    ],
)
def test_filtered_distributions_are_told_exactly(sampling: tuple[float, ...]) -> None:
    whole, bounds = both(3.0, *sampling)
    for bound in bounds.unbind(-1):
        torch.testing.assert_close(bound, whole.float(), atol=1e-4, rtol=0)


@pytest.mark.parametrize("sharpness", [0.5, 2.0, 6.0])
@pytest.mark.parametrize("sampling", [(1.0, 0, 1.0, 0.0), (0.6, 0, 1.0, 0.0)])
def test_distributions_that_are_not_cut_are_told_within_their_bounds(
    sharpness: float, sampling: tuple[float, ...]
) -> None:
    whole, bounds = both(sharpness, *sampling)
    low, high = bounds.unbind(-1)
    is_between = (low - 1e-4 <= whole.float()) & (whole.float() <= high + 1e-4)
    assert is_between.all()


def test_what_is_logged_belongs_to_its_depth() -> None:
    first, second = (record(torch.arange(VOCAB) * step, 1.0, 0, 1.0, 0.0) for step in (1.0, -1.0))
    both = dataclasses.replace(first, p=logged(*each(first.p), *each(second.p)), drafted=[1, 1])
    known = logged_arrays([LoggedPosition(both, 1), LoggedPosition(first, 0)])
    assert known.ids[:, 0].tolist() == [0, VOCAB - 1]
    tailed = dataclasses.replace(first, p=Distributions.unlogged(1))
    apart = logged_arrays(
        [LoggedPosition(tailed, 0), LoggedPosition(both, 0), LoggedPosition(both, 1)]
    )
    assert apart.ids[1:, 0].tolist() == [VOCAB - 1, 0]
    assert not np.isfinite(apart.logprobs[0]).any() and apart.tail[0] == 1
