"""The gradient of a batch: the mean over its tokens, however its rows are parted."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest
import torch

from draftsmith.distill.config import LearnConfig, LearnUnroll
from draftsmith.distill.learn.optimizer import CandidateOptimizer, computes_in_bf16
from draftsmith.distill.learn.teachers import Batch, LearningRow, LiveTeacher
from draftsmith.drafters.options import OPTIONS
from draftsmith.drafters.registry import FAMILIES
from draftsmith.drafters.target.target import Target
from draftsmith.train.data.roles import Row


def gradient(optimizer: CandidateOptimizer, batch: Batch) -> list[torch.Tensor]:
    optimizer.drafter.zero_grad()
    optimizer._backward(batch)
    return [parameter.grad.clone() for parameter in optimizer.drafter.parameters()]


def test_the_gradient_is_the_mean_over_the_weight_of_the_rows(
    target: Target, bigram: Callable
) -> None:
    chance = np.random.default_rng(0)
    rows = [
        Row(chance.integers(3, 288, size).tolist(), chance.random(size, dtype=np.float32))
        for size in (5, 17, 9, 12, 30)
    ]
    config = LearnConfig(unroll=LearnUnroll(steps=1), dtype="float32")
    optimizer = CandidateOptimizer(bigram(288).double(), config)

    def batch(some: list[Row]) -> Batch:
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
    rows = [Row(chance.integers(3, 288, 20).tolist(), np.ones(20, dtype=np.float32))]
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
    monkeypatch.setattr(torch.cpu, "_is_avx512_bf16_supported", lambda: fast)
    monkeypatch.setattr(torch.cpu, "_is_amx_tile_supported", lambda: False)
    for device in (torch.device("cuda"), torch.device("cpu")):
        assert computes_in_bf16("auto", device) is fast
        assert computes_in_bf16("bfloat16", device) and not computes_in_bf16("float32", device)


@pytest.mark.parametrize("family", ["eagle3", "draft-lm"])
def test_recomputed_activations_give_the_same_step_and_less_is_kept(
    tiny_target: Callable[..., str], family: str
) -> None:
    target = Target.load(tiny_target("llama"))
    chance = np.random.default_rng(0)
    rows = [Row(chance.integers(3, 288, 24).tolist(), np.ones(24, dtype=np.float32))]
    batch = LiveTeacher(target).batch([LearningRow(row, []) for row in rows])
    found = []
    for again in (False, True):
        drafter = FAMILIES[family].create(OPTIONS[family](), target, seed=0)
        config = LearnConfig(unroll=LearnUnroll(steps=3), gradient_checkpointing=again)
        optimizer, kept = CandidateOptimizer(drafter, config), {}

        def keep(tensor: torch.Tensor, kept: dict[int, int] = kept) -> torch.Tensor:
            storage = tensor.untyped_storage()
            kept[storage.data_ptr()] = storage.nbytes()
            return tensor

        with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
            assert optimizer.step(batch, lr=1e-3) is not None
        texts = torch.tensor([rows[0].tokens])
        with torch.inference_mode():  # as the gate scores it
            taps, _ = target.states(texts, torch.ones_like(texts), drafter.taps)
            states = [step.hidden for step in drafter.unroll(batch.text.unrolled(taps, 2))]
        found.append((drafter.state_dict(), states, sum(kept.values())))
    (plain, scored, much), (other, also_scored, little) = found
    assert all(torch.equal(plain[name], other[name]) for name in plain)
    assert all(torch.equal(*both) for both in zip(scored, also_scored, strict=True))
    assert little < 0.9 * much
