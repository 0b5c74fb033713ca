"""Recomputed activations are the same ones, and fewer are kept."""

from __future__ import annotations

import pytest
import torch

from draftsmith.drafters.interface import UnrollBatch
from draftsmith.drafters.options import OPTIONS
from draftsmith.drafters.registry import FAMILIES
from draftsmith.drafters.target.target import Target
from draftsmith.errors import UserError
from draftsmith.train.objective.unrolled_loss import recompute_mlps
from tests.unrolled import unroll_batch


def gradients(drafter: torch.nn.Module, batch: UnrollBatch) -> tuple[dict[str, torch.Tensor], int]:
    """And how many bytes the backward pass was left."""
    kept: dict[int, int] = {}

    def keep(tensor: torch.Tensor) -> torch.Tensor:
        kept[tensor.untyped_storage().data_ptr()] = tensor.untyped_storage().nbytes()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        loss = sum(step.hidden.pow(2).mean() for step in drafter.unroll(batch))
    loss.backward()
    return {
        name: parameter.grad
        for name, parameter in drafter.named_parameters()
        if parameter.grad is not None
    }, sum(kept.values())


@pytest.mark.parametrize("family", ["eagle3", "mtp", "draft-lm", "dflash"])
def test_gradients_are_the_same_and_less_is_kept(family, tiny_target):
    target = Target.load(tiny_target("llama"))
    ids = torch.randint(3, 288, (2, 24), generator=torch.Generator().manual_seed(0))
    plain = FAMILIES[family].create(OPTIONS[family](), target, seed=0)
    batch = unroll_batch(plain, target, ids, 3)
    own, much = gradients(plain, batch)
    again = FAMILIES[family].create(OPTIONS[family](), target, seed=0)
    recompute_mlps(again, "gradient_checkpointing")
    others, little = gradients(again, batch)
    assert own.keys() == others.keys() and own
    assert all(torch.equal(own[name], others[name]) for name in own)
    assert little < 0.8 * much


def test_a_draft_without_mlps_is_refused(tiny_target):
    drafter = FAMILIES["medusa"].create(
        OPTIONS["medusa"](), Target.load(tiny_target("llama")), seed=0
    )
    with pytest.raises(UserError, match="nothing to recompute in a draft of family 'medusa'"):
        recompute_mlps(drafter, "gradient_checkpointing")
