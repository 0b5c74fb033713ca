"""A learner's packed batches: the loss and every gradient of padded ones, with fewer positions
computed."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

import numpy as np
import pytest
import torch

from draftsmith.distill.config import LearnConfig, LearnUnroll
from draftsmith.distill.learn import learner as learning
from draftsmith.distill.learn.learner import CandidateOptimizer, arranged, batch_of, trained
from draftsmith.distill.learn.text_states import TextStates
from draftsmith.drafters.interface import TextBatch
from draftsmith.drafters.options import OPTIONS, DraftLmOptions
from draftsmith.drafters.registry import FAMILIES
from draftsmith.drafters.target.target import Target
from draftsmith.train.data.roles import TrainedRow
from draftsmith.train.objective.teacher import LiveSource, TargetSource
from tests.noise import noisy

LENGTHS = (17, 5, 2, 30, 9, 1, 12, 30, 8)
FAMILIES_HERE = ("eagle3", "draft-lm", "dflash", "medusa")


@pytest.fixture(scope="module")
def exact(tiny_target: Callable[..., str]) -> Target:
    return Target.load(tiny_target("llama"), dtype=torch.float64)


def drafter_of(family: str, target: Target) -> torch.nn.Module:
    options = OPTIONS[family]() if family != "draft-lm" else DraftLmOptions(hidden_size=32)
    drafter = FAMILIES[family].create(options, target, seed=0).to(torch.float64)
    return noisy(drafter, 2, 0.05)  # parts that begin at zero would hide what flows through them


def texts() -> list[TrainedRow]:
    """The first third of each is a prompt."""
    chance = np.random.default_rng(0)
    rows = []
    for size in LENGTHS:
        weights = chance.random(size, dtype=np.float32) + 0.1
        weights[: 1 + size // 3] = 0
        rows.append(TrainedRow(chance.integers(3, 288, size).tolist(), weights))
    return rows


def found(drafter: torch.nn.Module, source: TargetSource, batch: TextBatch) -> list[torch.Tensor]:
    """Loss, trained weight of each step, and every gradient."""
    config = LearnConfig(unroll=LearnUnroll(steps=3), dtype="float32")
    text = replace(batch, weights=batch.weights.double())
    unrolled = CandidateOptimizer(drafter, source, config).unrolled(text)
    gradients = torch.autograd.grad(
        unrolled.total, list(trained(drafter).values()), allow_unused=True, materialize_grads=True
    )
    return [unrolled.total.detach(), unrolled.sums.weight, unrolled.sums.alpha, *gradients]


def alone(rows: Sequence[TrainedRow]) -> list[list[int]]:
    return [[at] for at in range(len(rows))]


def same(ours: list[torch.Tensor], theirs: list[torch.Tensor], tolerance: float) -> bool:
    return all(
        torch.allclose(one, other, rtol=tolerance, atol=tolerance * float(other.abs().max()))
        for one, other in zip(ours, theirs, strict=True)
    )


@pytest.mark.parametrize("family", FAMILIES_HERE)
def test_packed_rows_train_what_padded_ones_do(
    exact: Target, monkeypatch: pytest.MonkeyPatch, family: str
) -> None:
    drafter, source = drafter_of(family, exact), LiveSource(exact, TextStates(exact, 1 << 30))
    packed = batch_of(texts(), exact.device)
    monkeypatch.setattr(learning, "arranged", alone)
    padded = batch_of(texts(), exact.device)
    assert packed.segments is not None and padded.segments is None
    assert int((packed.weights > 0).sum()) == int((padded.weights > 0).sum()) > 40
    assert packed.input_ids.numel() < 0.6 * padded.input_ids.numel()
    ours, theirs = found(drafter, source, packed), found(drafter, source, padded)
    assert same(ours, theirs, 1e-9)
    # Negative control: texts that saw each other.
    mixed = replace(packed, segments=None)
    assert not same(found(drafter, source, mixed), theirs, 1e-3)


def test_each_text_of_a_packed_row_has_the_states_of_a_pass_of_its_own(exact: Target) -> None:
    rows = texts()
    states = TextStates(exact, 1 << 30)
    batch = batch_of(rows, exact.device)
    taps, hidden = states.states(batch.input_ids, batch.attention_mask, (1, 2), batch.segments)
    assert taps is not None and states.num_read == len(rows)
    for places, tapped, last in zip(arranged(rows), taps, hidden, strict=True):
        begin = 0
        for at in places:
            ids = torch.tensor([rows[at].tokens])
            end = begin + ids.shape[1]
            both = exact.states(ids, torch.ones_like(ids), (1, 2))
            assert torch.equal(tapped[begin:end], both[0][0])
            assert torch.equal(last[begin:end], both[1][0])
            begin = end
        assert not last[begin:].any() and not tapped[begin:].any()
