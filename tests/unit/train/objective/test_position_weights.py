"""Weights of depths, and the mean of the loss over passes and packed rows."""

from __future__ import annotations

import pytest
import torch
from torch.nn.utils.rnn import pad_sequence

from draftsmith.drafters.interface import TextBatch
from draftsmith.drafters.options import DraftLmOptions, Eagle3Options
from draftsmith.drafters.registry import FAMILIES
from draftsmith.drafters.target.target import Target
from draftsmith.train.config import UnrollConfig
from draftsmith.train.objective.teacher import LiveSource
from draftsmith.train.objective.unrolled_loss import unrolled_loss
from draftsmith.train.trainer import Trainee


@pytest.fixture(scope="module")
def target(tiny_target) -> Target:
    return Target.load(tiny_target("llama"), dtype=torch.float64)


def test_a_step_that_stands_for_several_depths_gets_their_weights(target):
    """A language model drafts alike at every depth, so its one step counts for all."""
    options = DraftLmOptions(num_layers=1, hidden_size=32)
    drafter = FAMILIES["draft-lm"].create(options, target, seed=0).to(torch.float64)
    ids = torch.randint(3, 288, (1, 9), generator=torch.Generator().manual_seed(3))
    mask = torch.ones_like(ids)
    batch = TextBatch(input_ids=ids, attention_mask=mask, weights=(mask.cumsum(-1) > 2).double())
    alone, deep = (
        unrolled_loss(drafter, LiveSource(target), batch, num_steps=steps, decay=0.5)
        for steps in (1, 4)
    )
    assert deep.total.item() == pytest.approx(1.875 * alone.total.item(), rel=1e-12)
    assert deep.scale == 1.875


def test_the_mean_is_the_same_packed_apart_and_accumulated(target):
    """Three texts: a row each, all in one row, and one pass each, divided by what all of them
    count."""
    drafter = FAMILIES["eagle3"].create(Eagle3Options(), target, seed=0).to(torch.float64)
    trainee = Trainee(drafter, LiveSource(target), UnrollConfig(steps=3))
    generator = torch.Generator().manual_seed(0)
    ids = [torch.randint(3, 288, (size,), generator=generator) for size in (9, 4, 12)]
    weights = [(torch.arange(len(one)) >= 2).float() for one in ids]

    def passed(
        ids: torch.Tensor, weights: torch.Tensor, segments: torch.Tensor | None = None
    ) -> TextBatch:
        mask = (ids > 0).long()
        return TextBatch(input_ids=ids, attention_mask=mask, weights=weights, segments=segments)

    apart = [passed(one[None], weight[None]) for one, weight in zip(ids, weights)]
    rows = passed(*(pad_sequence(each, batch_first=True) for each in (ids, weights)))
    numbers = torch.repeat_interleave(torch.arange(3), torch.tensor([len(one) for one in ids]))
    packed = passed(torch.cat(ids)[None], torch.cat(weights)[None], numbers[None])

    def loss(passes: list[TextBatch]) -> float:
        count = torch.stack([text.weights.sum() for text in passes]).sum()
        return sum(
            float(trainee(text, num_items_in_batch=count)["loss"].detach()) for text in passes
        )

    # The weights of tokens are float32.
    assert loss([rows]) == pytest.approx(loss(apart), rel=1e-6)
    assert loss([packed]) == pytest.approx(loss(apart), rel=1e-6)
