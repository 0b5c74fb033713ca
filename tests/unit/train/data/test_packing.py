"""Packed equals unpacked: the loss and every gradient, whatever the family and whatever the
target's attention.

In float64 the two differ by rounding alone: sums run in another order, and targets with a soft cap
take their softmax in float32.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import cache

import pytest
import torch

from draftsmith.drafters.interface import TextBatch
from draftsmith.drafters.options import (
    DflashOptions,
    DraftLmOptions,
    DsparkOptions,
    Eagle1Options,
    Eagle3Options,
    MedusaOptions,
    MlpOptions,
    MtpOptions,
    PeagleOptions,
)
from draftsmith.drafters.registry import FAMILIES
from draftsmith.drafters.target.target import Target
from draftsmith.train.data.batches import pack
from draftsmith.train.data.dataset import TokenSequence
from draftsmith.train.objective.teacher import LiveSource
from draftsmith.train.objective.unrolled_loss import unrolled_loss
from tests.noise import noisy

LENGTHS = (17, 5, 2, 30, 9, 1, 12)
ROWS = ((3, 1, 6), (0, 4, 2), (5,))  # which texts share a row: sums of 47, 28 and 1
OPTIONS = {
    "eagle3": Eagle3Options(),
    "eagle1": Eagle1Options(),
    "p-eagle": PeagleOptions(),
    "mtp": MtpOptions(),
    "draft-lm": DraftLmOptions(num_layers=2, hidden_size=32),
    "medusa": MedusaOptions(num_heads=3),
    "mlp": MlpOptions(),
    "dflash": DflashOptions(block_size=4),
    "dspark": DsparkOptions(block_size=4),
}


def batch(rows: Sequence[tuple[int, ...]], *, segments: bool) -> TextBatch:
    """Every token but the first of its text counts, each differently."""
    generator = torch.Generator().manual_seed(0)
    texts = [
        TokenSequence(
            "", torch.randint(3, 288, (length,), generator=generator), torch.arange(length) > 0
        )
        for length in LENGTHS
    ]
    found = pack([[texts[at] for at in row] for row in rows])
    weights = found.weights.double() * (0.1 + 0.1 * (found.input_ids % 10))
    return replace(found, weights=weights, segments=found.segments if segments else None)


@cache
def loaded(folder: str) -> Target:
    return Target.load(folder, dtype=torch.float64)


def trained(
    family: str, folder: str, text: TextBatch
) -> tuple[torch.Tensor, list[torch.Tensor], torch.Tensor]:
    """(loss, gradients, trained weight of each step)"""
    target = loaded(folder)
    drafter = FAMILIES[family].create(OPTIONS[family], target, seed=0).to(torch.float64)
    noisy(drafter, 2, 0.05)  # parts that begin at zero would hide what flows through them
    unrolled = unrolled_loss(drafter, LiveSource(target), text, num_steps=3, decay=0.8)
    parameters = [parameter for parameter in drafter.parameters() if parameter.requires_grad]
    gradients = torch.autograd.grad(
        unrolled.total, parameters, allow_unused=True, materialize_grads=True
    )
    return unrolled.total.detach(), list(gradients), unrolled.sums.weight


CASES = [(family, "llama") for family in OPTIONS] + [
    (family, arch) for arch in ("mistral", "gemma", "gemma2", "gpt2") for family in ("eagle3", "dflash")
] + [("medusa", "mistral"), ("mtp", "gemma2")]  # fmt: skip


@pytest.mark.parametrize(("family", "arch"), CASES)
def test_packed_equals_unpacked(tiny_target, family, arch):
    folder = tiny_target(arch)
    loss, gradients, weight = trained(
        family, folder, batch([(at,) for at in range(len(LENGTHS))], segments=False)
    )
    packed_loss, packed_gradients, packed_weight = trained(
        family, folder, batch(ROWS, segments=True)
    )
    tolerance = 1e-5 if arch == "gemma2" else 1e-9
    assert torch.allclose(packed_weight, weight, rtol=1e-12)
    assert packed_loss.item() == pytest.approx(loss.item(), rel=tolerance)
    for one, other in zip(packed_gradients, gradients, strict=True):
        assert torch.allclose(one, other, rtol=tolerance, atol=tolerance * float(other.abs().max()))


@pytest.mark.parametrize("family", ["eagle3", "draft-lm", "dflash"])
def test_texts_that_saw_each_other_would_be_noticed(tiny_target, family):
    """Negative control: the same rows read as one text each."""
    folder = tiny_target("llama")
    loss, _, _ = trained(family, folder, batch(ROWS, segments=True))
    mixed, _, _ = trained(family, folder, batch(ROWS, segments=False))
    assert abs(mixed.item() - loss.item()) > 1e-2 * loss.item()
