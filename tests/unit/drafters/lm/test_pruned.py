"""A draft cut out of its target."""

from __future__ import annotations

import pytest
import torch

from draftsmith.drafters.interface import UnrollBatch
from draftsmith.drafters.lm.draft_lm import DraftLm
from draftsmith.drafters.options import DraftLmOptions
from draftsmith.drafters.target.target import Target
from draftsmith.errors import UserError


def logits(drafter: DraftLm, ids: torch.Tensor) -> torch.Tensor:
    batch = UnrollBatch(input_ids=ids, attention_mask=torch.ones_like(ids), taps=None, num_steps=1)
    with torch.no_grad():
        return next(drafter.unroll(batch)).hidden @ drafter.head_weight().T


@pytest.mark.parametrize("architecture", ["llama", "qwen3", "mistral", "gpt_neox", "mixtral"])
def test_all_layers_are_the_target_and_fewer_are_not(tiny_target, architecture):
    target = Target.load(tiny_target(architecture))
    ids = torch.arange(5, 17)[None]
    _, hidden = target.states(ids, torch.ones_like(ids), ())
    everything = tuple(range(target.num_layers))
    whole = DraftLm.create(DraftLmOptions(target_layers=everything), target, seed=0)
    torch.testing.assert_close(logits(whole, ids), target.head(hidden), rtol=1e-5, atol=1e-5)
    part = DraftLm.create(DraftLmOptions(target_layers=everything[:1]), target, seed=0)
    assert part.lm.num_layers == 1
    assert (logits(part, ids) - target.head(hidden)).abs().max() > 1e-3


def test_training_the_draft_leaves_the_target_alone(tiny_target):
    target = Target.load(tiny_target("llama"))
    before = target.model.get_input_embeddings().weight.clone()
    drafter = DraftLm.create(DraftLmOptions(target_layers=(0,)), target, seed=0)
    assert all(parameter.requires_grad for parameter in drafter.parameters())
    with torch.no_grad():
        for parameter in drafter.parameters():
            parameter.zero_()
    torch.testing.assert_close(target.model.get_input_embeddings().weight, before)


@pytest.mark.parametrize("layers", [(), (1, 0), (0, 0), (-1,), (99,)])
def test_layers_that_are_not_there_are_refused(tiny_target, layers):
    with pytest.raises(UserError, match="target_layers"):
        DraftLm.create(
            DraftLmOptions(target_layers=layers), Target.load(tiny_target("llama")), seed=0
        )
