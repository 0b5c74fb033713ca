"""Whole runs with on-policy text and with noise, in this process, on a tiny target."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from draftsmith.errors import UserError
from draftsmith.train import resolve
from draftsmith.train.command import run
from draftsmith.train.config import OnPolicyConfig, OptimConfig, TrainConfig, UnrollConfig
from draftsmith.train.objective.unrolled_loss import FeatureNoise

STEADY = OptimConfig(lr=5e-3, schedule="constant", warmup=0.0)
OWN = OnPolicyConfig(share=0.5, refresh=2, k=3, tokens=6)


@pytest.fixture
def configure(configure: Callable[..., TrainConfig], tmp_path: Path) -> Callable[..., TrainConfig]:
    fixed = {"steps": 5, "log_every": 1, "save_every": 3, "batch_size": 4, "optim": STEADY}

    def config(out: str, family: str = "eagle3", **changes: object) -> TrainConfig:
        return configure(family, **fixed | {"out": str(tmp_path / out)} | changes)

    return config


def losses(config: TrainConfig) -> list[float]:
    lines = (Path(config.out) / "metrics.jsonl").read_text().splitlines()
    return [record["loss"] for record in map(json.loads, lines) if "loss" in record]


def weights(config: TrainConfig) -> dict[str, torch.Tensor]:
    return load_file(Path(config.out) / "model.safetensors")


def same(one: dict[str, torch.Tensor], other: dict[str, torch.Tensor]) -> bool:
    return all(torch.equal(one[name], other[name]) for name in one)


@pytest.mark.parametrize(
    ("family", "changes"),
    [
        pytest.param("eagle3", {"on_policy": OWN}, marks=pytest.mark.long),
        ("draft-lm", {"on_policy": replace(OWN, share=1.0), "accumulate": 2, "mean": "sample"}),
        pytest.param(
            "mtp",
            {
                "unroll": UnrollConfig(noise=0.1, weights="d-pace"),
                "packing": True,
                "max_length": 64,
            },
            marks=pytest.mark.long,
        ),
    ],
)
def test_a_resumed_run_is_the_straight_one_to_the_bit(family: str, changes: dict, configure):
    """Resumed after step 3, between two writings of texts."""
    straight, resumed, plain = (
        configure(name, family, **changes) for name in ("straight", "resumed", "plain")
    )
    run(straight)
    run(replace(resumed, steps=3))
    run(resumed)
    assert losses(straight) == losses(resumed) and len(losses(straight)) == 5
    assert same(weights(straight), weights(resumed))
    # Negative control: the option does something, from the first step on.
    run(replace(plain, on_policy=OnPolicyConfig(), unroll=UnrollConfig(), steps=1))
    assert losses(plain)[0] != losses(straight)[0]


def test_a_run_of_another_seed_sees_other_texts_and_other_noise(configure):
    first, second = (
        configure(f"seed-{seed}", on_policy=OWN, unroll=UnrollConfig(noise=0.1), steps=2)
        for seed in (0, 1)
    )
    run(first)
    run(replace(second, seed=1))
    assert losses(first) != losses(second)


@pytest.mark.parametrize("mean", ["token", "sample"])
def test_a_step_without_any_position_that_counts_trains_nothing(mean, configure):
    """A draft that knows nothing yet, and nothing but what it gets right counts: 0 of 0 would be
    the end of its weights."""
    kept_only = OnPolicyConfig(
        share=1.0, refresh=1, k=3, tokens=2, positions=("accepted", "bonus"), later_rejected=0.0
    )
    # Rows end behind the first token that was drafted.
    found = configure(
        f"kept-{mean}", mean=mean, on_policy=kept_only, batch_size=1, max_length=6, steps=4
    )
    run(found)
    assert 0.0 in losses(found)  # the case occurs
    assert all(weight.isfinite().all() for weight in weights(found).values())


def test_noise_is_uniform_and_a_function_of_seed_step_and_text():
    ids = torch.randint(3, 288, (2, 40), generator=torch.Generator().manual_seed(0))
    taps = torch.zeros(2, 40, 64)
    noisy = FeatureNoise(0.1, 0, 5).added(taps, ids)
    assert noisy.abs().max() <= 0.1 and noisy.abs().max() > 0.099
    # 5,120 draws of variance width^2 / 3: the mean lies within five standard errors.
    assert abs(float(noisy.mean())) < 5 * 0.1 / (3 * 5120) ** 0.5
    assert noisy.var().item() == pytest.approx(0.1**2 / 3, rel=0.1)
    assert torch.equal(noisy, FeatureNoise(0.1, 0, 5).added(taps, ids))
    for other in (
        FeatureNoise(0.1, 1, 5).added(taps, ids),
        FeatureNoise(0.1, 0, 6).added(taps, ids),
    ):
        assert not torch.equal(noisy, other)
    assert not torch.equal(noisy, FeatureNoise(0.1, 0, 5).added(taps, ids + 1))


@pytest.mark.parametrize(
    ("family", "noise"), [("draft-lm", 0.1), ("eagle3", -0.1), ("eagle3", float("nan"))]
)
def test_noise_that_cannot_be_is_refused_in_one_sentence(family: str, noise: float, configure):
    with pytest.raises(UserError, match=r"unroll\.noise"):
        resolve.check(configure("refused", family, unroll=UnrollConfig(noise=noise)))
