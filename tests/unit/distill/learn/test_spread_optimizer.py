"""Shares of a batch: every row in one of them, with its weights."""

from __future__ import annotations

import pytest
import torch

from draftsmith.distill.learn import spread_optimizer
from draftsmith.distill.learn.spread_optimizer import Step, by_length, rows_of, share_of, step_of
from draftsmith.drafters.interface import TextBatch
from draftsmith.drafters.target.target import Target


@pytest.mark.parametrize("rows, size", [(5, 2), (1, 2), (3, 4), (4, 1)])
def test_each_row_counts_once(
    target: Target, monkeypatch: pytest.MonkeyPatch, rows: int, size: int
) -> None:
    monkeypatch.setattr(spread_optimizer.dist, "get_world_size", lambda: size)
    ids = torch.arange(1, rows + 1)[:, None].repeat(1, 3)
    weights = ids.float()
    call = Step(0, ids, torch.ones_like(ids), weights, 6.0, 1e-3, 8, 0, torch.float32)
    counted: list[int] = []
    for rank in range(size):
        hidden = torch.zeros(len(rows_of(rank, call)), 3, 8)
        share = share_of(call, rank, target, None, hidden)
        assert share.weight == 6.0 and len(share.text.input_ids)
        is_counted = share.text.weights[:, 0] > 0
        counted += share.text.input_ids[is_counted, 0].tolist()
        assert torch.equal(
            share.text.weights[is_counted], weights[share.text.input_ids[:, 0] - 1][is_counted]
        )
    assert sorted(counted) == list(range(1, rows + 1))


def test_long_rows_come_first_with_what_belongs_to_them() -> None:
    mask = torch.tensor([[1, 0, 0], [1, 1, 1], [1, 1, 0]])
    ids = mask * torch.tensor([[3], [4], [5]])
    text = by_length(TextBatch(input_ids=ids, attention_mask=mask, weights=ids.float()))
    assert text.input_ids[:, 0].tolist() == [4, 5, 3] == text.weights[:, 0].tolist()
    assert text.attention_mask.sum(dim=1).tolist() == [3, 2, 1]


def test_steps_of_moments() -> None:
    assert step_of({}) == 0
    assert step_of({"a:exp_avg": torch.zeros(2), "a:step": torch.tensor(7.0)}) == 7
