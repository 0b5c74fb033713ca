"""Shares of a batch: every row in one of them, with its weights."""

from __future__ import annotations

import gc
import weakref
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from accelerate.state import AcceleratorState

from draftsmith.distill.config import LearnConfig, LearnUnroll
from draftsmith.distill.learn import spread_optimizer
from draftsmith.distill.learn.draft_shares import Replicated, new_accelerator, untouched
from draftsmith.distill.learn.optimizer import CandidateOptimizer, trained
from draftsmith.distill.learn.spread_optimizer import (
    SentSource,
    Step,
    blank,
    by_length,
    rows_of,
    share_of,
    steps_of,
)
from draftsmith.distill.learn.teachers import Share
from draftsmith.drafters.interface import TextBatch
from draftsmith.drafters.options import OPTIONS
from draftsmith.drafters.registry import FAMILIES
from draftsmith.drafters.target.target import Target
from draftsmith.train.data.batches import rows_at


@pytest.mark.parametrize("rows, size", [(5, 2), (1, 2), (3, 4), (4, 1)])
def test_each_row_counts_once(
    target: Target, monkeypatch: pytest.MonkeyPatch, rows: int, size: int
) -> None:
    monkeypatch.setattr(spread_optimizer.dist, "get_world_size", lambda: size)
    ids = torch.arange(1, rows + 1)[:, None].repeat(1, 3)
    weights = ids.float()
    text = TextBatch(input_ids=ids, attention_mask=torch.ones_like(ids), weights=weights)
    call = Step(0, text, 6.0, 1e-3, 8, 0, torch.float32, None)
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
    text = TextBatch(input_ids=ids, attention_mask=mask, weights=ids.float())
    text = rows_at(text, by_length(text))
    assert text.input_ids[:, 0].tolist() == [4, 5, 3] == text.weights[:, 0].tolist()
    assert text.attention_mask.sum(dim=1).tolist() == [3, 2, 1]


def test_steps_of_moments() -> None:
    assert steps_of({}) == {}
    moments = {"a:exp_avg": torch.zeros(2), "a:step": torch.tensor(7.0), "b:step": torch.tensor(2)}
    assert steps_of(moments) == {"a": 7, "b": 2}


@pytest.mark.parametrize("family", OPTIONS)
def test_a_blank_share_reaches_the_parameters_that_texts_do(family: str, target: Target) -> None:
    drafter = FAMILIES[family].create(OPTIONS[family](), target, seed=0)
    config = LearnConfig(unroll=LearnUnroll(steps=1))
    optimizer = CandidateOptimizer(drafter, config)
    ids = torch.randint(3, 288, (2, 20), generator=torch.Generator().manual_seed(0))
    text = TextBatch(
        input_ids=ids, attention_mask=torch.ones_like(ids), weights=torch.ones_like(ids).float()
    )
    taps, hidden = target.states(ids, torch.ones_like(ids), drafter.taps)
    optimizer._backward(Share(text, SentSource(target, taps, hidden), 40.0))
    idle = {id(one) for one in trained(drafter).values() if one.grad is None}
    found = untouched(optimizer, blank(drafter, target))
    assert {id(one) for one in found} == idle
    assert bool(idle) == (family in ("medusa", "mlp"))


def test_a_draft_that_is_dropped_is_held_by_nothing(target: Target, tmp_path: Path) -> None:
    dist.init_process_group("gloo", init_method=f"file://{tmp_path}/store", rank=0, world_size=1)
    try:
        accelerator = new_accelerator(LearnConfig(), torch.device("cpu"))
        drafter = FAMILIES["mtp"].create(OPTIONS["mtp"](), target, seed=0)
        part = Replicated(drafter, LearnConfig(), accelerator, blank(drafter, target))
        part.step(blank(drafter, target), lr=0.0)
        held = weakref.ref(drafter)
        del drafter, part
        gc.collect()
        assert held() is None
    finally:
        dist.destroy_process_group()
        AcceleratorState._reset_state(reset_partial_state=True)
