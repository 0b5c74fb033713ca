"""The gradient of a batch: the mean over its tokens, however its rows are parted."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest
import torch

from draftsmith.distill.buffer.traffic import TrainedRow
from draftsmith.distill.config import LearnConfig, LearnUnroll
from draftsmith.distill.learn.learner import CandidateOptimizer, computes_in_bf16, trained
from draftsmith.distill.learn.teachers import LearningBatch, LearningRow, LiveTeacher
from draftsmith.drafters.options import OPTIONS
from draftsmith.drafters.registry import FAMILIES
from draftsmith.drafters.target.target import Target
from draftsmith.train.config import UnrollConfig
from draftsmith.train.objective.teacher import LiveSource
from draftsmith.train.optim import MUON_MOMENT
from draftsmith.train.trainer import Trainee


def gradient(optimizer: CandidateOptimizer, batch: LearningBatch) -> list[torch.Tensor]:
    optimizer.drafter.zero_grad()
    optimizer._backward(batch)
    return [parameter.grad.clone() for parameter in optimizer.drafter.parameters()]


def test_the_gradient_is_the_mean_over_the_weight_of_the_rows(
    target: Target, bigram: Callable
) -> None:
    chance = np.random.default_rng(0)
    rows = [
        TrainedRow(chance.integers(3, 288, size).tolist(), chance.random(size, dtype=np.float32))
        for size in (5, 17, 9, 12, 30)
    ]
    config = LearnConfig(unroll=LearnUnroll(steps=1), dtype="float32")
    optimizer = CandidateOptimizer(bigram(288).double(), config)

    def batch(some: list[TrainedRow]) -> LearningBatch:
        return LiveTeacher(target).batch([LearningRow(row, []) for row in some])

    whole = gradient(optimizer, batch(rows))
    parts = [batch(some) for some in (rows[:2], rows[2:3], rows[3:])]
    shares = [part.weight / batch(rows).weight for part in parts]
    alone = [gradient(optimizer, part) for part in parts]
    for index, expected in enumerate(whole):
        mean = sum(share * one[index] for share, one in zip(shares, alone, strict=True))
        # The target's distributions are float32 of differently padded batches.
        torch.testing.assert_close(mean, expected, rtol=1e-4, atol=1e-7)
    # Negative control: without the weights of the parts the mean is another.
    even = sum(one[0] / len(parts) for one in alone)
    assert not torch.allclose(even, whole[0], rtol=1e-2)


def test_a_step_in_bfloat16_keeps_float32_weights_and_nearly_their_gradient(
    target: Target, bigram: Callable
) -> None:
    chance = np.random.default_rng(0)
    rows = [TrainedRow(chance.integers(3, 288, 20).tolist(), np.ones(20, dtype=np.float32))]
    drafter = bigram(288)
    exact, rounded = (
        CandidateOptimizer(drafter, LearnConfig(unroll=LearnUnroll(steps=1), dtype=dtype))
        for dtype in ("float32", "bfloat16")
    )
    batch = LiveTeacher(target).batch([LearningRow(row, []) for row in rows])
    for one, other in zip(gradient(exact, batch), gradient(rounded, batch), strict=True):
        assert other.dtype == torch.float32 and not torch.equal(one, other)
        assert torch.cosine_similarity(one.flatten(), other.flatten(), dim=0) > 0.999
    assert rounded.step(batch, lr=1e-3) is not None
    assert all(parameter.dtype == torch.float32 for parameter in drafter.parameters())


@pytest.mark.parametrize("fast", [True, False])
def test_a_machine_that_is_fast_at_bfloat16_computes_in_it_unasked(
    monkeypatch: pytest.MonkeyPatch, fast: bool
) -> None:
    monkeypatch.setattr(torch.cuda, "is_bf16_supported", lambda: fast)
    assert computes_in_bf16("auto", torch.device("cuda")) is fast
    for device in (torch.device("cuda"), torch.device("cpu")):
        assert computes_in_bf16("bfloat16", device) and not computes_in_bf16("float32", device)


class Steps:
    """Optimizers of like drafts, and a batch for them."""

    def __init__(self, folder: str):
        self.target = Target.load(folder)
        chance = np.random.default_rng(0)
        row = TrainedRow(chance.integers(3, 288, 24).tolist(), np.ones(24, dtype=np.float32))
        self.batch = LiveTeacher(self.target).batch([LearningRow(row, [])])

    def new(self, name: str, weights: dict[str, torch.Tensor] | None = None) -> CandidateOptimizer:
        drafter = FAMILIES["eagle3"].create(OPTIONS["eagle3"](), self.target, seed=0)
        if weights is not None:
            drafter.load_state_dict(weights)
        return CandidateOptimizer(drafter, LearnConfig(optimizer=name, dtype="float32"))

    def take(self, optimizer: CandidateOptimizer, count: int) -> dict[str, torch.Tensor]:
        for _ in range(count):
            assert optimizer.step(self.batch, lr=1e-2) is not None
        return {name: one.detach().clone() for name, one in optimizer.drafter.state_dict().items()}


def test_offline_and_online_steps_of_a_batch_have_one_gradient(
    tiny_target: Callable[..., str],
) -> None:
    steps = Steps(tiny_target("llama"))
    online = steps.new("adamw")
    text, drafter, own = steps.batch.text, steps.new("adamw").drafter, online.config.unroll
    trainee = Trainee(
        drafter, LiveSource(steps.target), UnrollConfig(steps=own.steps, decay=own.decay)
    )
    trainee(text, num_items_in_batch=text.weights.sum())["loss"].backward()
    online._backward(steps.batch)
    offline = trained(drafter)
    for name, parameter in trained(online.drafter).items():
        torch.testing.assert_close(parameter.grad, offline[name].grad)
    assert any(bool(parameter.grad.any()) for parameter in offline.values())


@pytest.mark.parametrize("name", ["adamw", "muon"])
def test_saved_moments_go_on_and_those_of_another_optimizer_are_left_out(
    tiny_target: Callable[..., str], name: str
) -> None:
    steps = Steps(tiny_target("llama"))
    first = steps.new(name)
    weights = steps.take(first, 2)
    moments = {key: value.clone() for key, value in first.moments().items()}
    again, fresh = steps.new(name, weights), steps.new(name, weights)
    again.fill(moments)
    third = steps.take(first, 1)
    assert all(torch.equal(one, third[key]) for key, one in steps.take(again, 1).items())
    assert not all(torch.equal(one, third[key]) for key, one in steps.take(fresh, 1).items())
    other = steps.new({"adamw": "muon", "muon": "adamw"}[name], weights)
    other.fill(moments)
    kept = other.moments()
    # Those of the tables and vectors, which AdamW has in both.
    assert 0 < len(kept) < len(moments)
    assert set(kept) < set(moments) and not any(key.endswith(MUON_MOMENT) for key in kept)
    steps.take(other, 1)


@pytest.mark.parametrize("name", ["adamw", "muon"])
def test_all_parts_step_at_the_rate_of_the_step(tiny_target: Callable[..., str], name: str) -> None:
    steps = Steps(tiny_target("llama"))
    optimizer = steps.new(name)
    before = steps.take(optimizer, 0)
    assert optimizer.step(steps.batch, lr=0.0) is not None
    assert all(torch.equal(one, before[key]) for key, one in steps.take(optimizer, 0).items())
