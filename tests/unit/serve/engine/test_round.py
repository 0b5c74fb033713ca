"""Sampling parameters of a round as tensors."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from draftsmith.kernels.sampling.filters import SamplingRows
from draftsmith.kernels.sampling.random_streams import round_seeds
from draftsmith.serve.engine.round import RowSampling
from draftsmith.serve.engine.scheduler import ScheduledRow
from draftsmith.serve.requests.request import Request
from draftsmith.serve.sampling.params import SamplingParams

FIRST = SamplingParams(temperature=0.8, top_k=20, min_p=0.1)
SECOND = SamplingParams(temperature=0.0, top_p=0.9)


def sampling(*params: SamplingParams) -> RowSampling:
    requests = [
        Request(f"{i}", [1], 1, one, seed=i, k=0, max_tokens=9) for i, one in enumerate(params)
    ]
    return RowSampling([ScheduledRow(request, 0, 1) for request in requests], torch.device("cpu"))


def values(rows: SamplingRows) -> Sequence[Sequence[float]]:
    parts = (rows.temperature, rows.top_k, rows.top_p, rows.min_p)
    return [[round(value, 6) for value in part.tolist()] for part in parts]


def test_each_row_has_the_distribution_of_its_request() -> None:
    found = sampling(FIRST, SECOND).repeated([0, 2])
    assert values(found) == [[0.8, 0, 0, 0], [20, 0, 0, 0], [1, 0.9, 0.9, 0.9], [0.1, 0, 0, 0]]
    assert found.passes.greedy and not found.passes.all_greedy and found.passes.top_k == 20
    drafts = sampling(FIRST, SECOND).draft_distributions(1, [0.5])
    assert values(drafts) == [[0.5], [20], [1], [0.1]]


def test_rounds_of_the_same_requests_share_their_tensors() -> None:
    first = sampling(FIRST, SECOND).repeated([1])
    assert sampling(FIRST, SECOND).repeated([1]) is first
    others = sampling(SECOND, FIRST).repeated([1]), sampling(FIRST, SECOND).repeated([0, 1])
    assert all(values(other) != values(first) for other in others)


def test_what_is_sent_ahead_is_what_would_be_made() -> None:
    made, found = (sampling(FIRST, SECOND, FIRST) for _ in range(2))
    tables, _ = found.send(torch.tensor([[3, 4], [5, 6], [7, 8]]), num_drafting=2)
    assert tables.tolist() == [[3, 4], [5, 6], [7, 8]]
    assert torch.equal(found.draft_seeds, round_seeds(made.seeds, made.positions)[:2])
    assert torch.equal(made.draft_seeds, round_seeds(made.seeds, made.positions))
    for name in ("seeds", "positions", "budgets"):
        assert torch.equal(getattr(found, name), getattr(made, name))
