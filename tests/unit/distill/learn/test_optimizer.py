"""The gradient of a batch: the mean over its tokens, however its rows are parted."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest
import torch

from draftsmith.distill.config import LearnConfig, LearnUnroll
from draftsmith.distill.learn.learner import CandidateOptimizer, batch_of, computes_in_bf16, trained
from draftsmith.drafters.interface import TextBatch
from draftsmith.drafters.options import OPTIONS
from draftsmith.drafters.registry import FAMILIES
from draftsmith.drafters.target.target import Target
from draftsmith.train.config import UnrollConfig
from draftsmith.train.data.roles import TrainedRow
from draftsmith.train.objective.teacher import LiveSource
from draftsmith.train.trainer import Trainee


def gradient(optimizer: CandidateOptimizer, batch: TextBatch) -> list[torch.Tensor]:
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
    optimizer = CandidateOptimizer(bigram(288).double(), LiveSource(target), config)

    def batch(some: list[TrainedRow]) -> TextBatch:
        return batch_of(some, target.device)

    whole = gradient(optimizer, batch(rows))
    parts = [batch(some) for some in (rows[:2], rows[2:3], rows[3:])]
    shares = [float(part.weights.sum() / batch(rows).weights.sum()) for part in parts]
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
    configs = (
        LearnConfig(unroll=LearnUnroll(steps=1), dtype=dtype) for dtype in ("float32", "bfloat16")
    )
    exact, rounded = (CandidateOptimizer(drafter, LiveSource(target), one) for one in configs)
    batch = batch_of(rows, target.device)
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
        self.batch = batch_of([row], self.target.device)

    def new(self, weights: dict[str, torch.Tensor] | None = None) -> CandidateOptimizer:
        drafter = FAMILIES["eagle3"].create(OPTIONS["eagle3"](), self.target, seed=0)
        if weights is not None:
            drafter.load_state_dict(weights)
        config = LearnConfig(dtype="float32")
        return CandidateOptimizer(drafter, LiveSource(self.target), config)

    def take(self, optimizer: CandidateOptimizer, count: int) -> dict[str, torch.Tensor]:
        for _ in range(count):
            assert optimizer.step(self.batch, lr=1e-2) is not None
        return {name: one.detach().clone() for name, one in optimizer.drafter.state_dict().items()}


def test_offline_and_online_steps_of_a_batch_have_one_gradient(
    tiny_target: Callable[..., str],
) -> None:
    steps = Steps(tiny_target("llama"))
    online = steps.new()
    text, drafter, own = steps.batch, steps.new().drafter, online.config.unroll
    trainee = Trainee(
        drafter, LiveSource(steps.target), UnrollConfig(steps=own.steps, decay=own.decay)
    )
    trainee(text, num_items_in_batch=text.weights.sum())["loss"].backward()
    online._backward(steps.batch)
    offline = trained(drafter)
    for name, parameter in trained(online.drafter).items():
        torch.testing.assert_close(parameter.grad, offline[name].grad)
    assert any(bool(parameter.grad.any()) for parameter in offline.values())


def test_saved_moments_go_on(tiny_target: Callable[..., str]) -> None:
    steps = Steps(tiny_target("llama"))
    first = steps.new()
    weights = steps.take(first, 2)
    moments = {key: value.clone() for key, value in first.moments().items()}
    again, fresh = steps.new(weights), steps.new(weights)
    again.fill(moments)
    third = steps.take(first, 1)
    assert all(torch.equal(one, third[key]) for key, one in steps.take(again, 1).items())
    assert not all(torch.equal(one, third[key]) for key, one in steps.take(fresh, 1).items())


def test_a_step_is_at_its_rate(tiny_target: Callable[..., str]) -> None:
    steps = Steps(tiny_target("llama"))
    optimizer = steps.new()
    before = steps.take(optimizer, 0)
    assert optimizer.step(steps.batch, lr=0.0) is not None
    assert all(torch.equal(one, before[key]) for key, one in steps.take(optimizer, 0).items())
