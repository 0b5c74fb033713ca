"""A source that several drafts read in turn."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from draftsmith.drafters.interface import TextBatch
from draftsmith.drafters.target.taps import FINAL
from draftsmith.drafters.target.target import Target
from draftsmith.train.objective.teacher import LiveSource, SharedSource


@pytest.fixture(scope="module")
def live(tiny_target) -> LiveSource:
    return LiveSource(Target.load(tiny_target("llama")))


def text_of(seed: int) -> TextBatch:
    ids = torch.randint(3, 288, (2, 9), generator=torch.Generator().manual_seed(seed))
    return TextBatch(input_ids=ids, attention_mask=torch.ones_like(ids), weights=torch.ones(2, 9))


def test_every_draft_gets_its_own_taps_of_one_pass(live: LiveSource) -> None:
    source, text = SharedSource(live, (FINAL, 1, 2, 3)), text_of(0)
    row, position = torch.tensor([0, 1]), torch.tensor([4, 8])
    for taps in ((1, 2, 3), (FINAL,), (3, 1), (), (FINAL, 1, 2, 3)):
        # Each trainer brings a copy of the batch; the weights in its loss may be others.
        copied = replace(text, input_ids=text.input_ids.clone(), weights=text.weights / 2)
        found, wanted = source.read(copied, taps), live.read(text, taps)
        assert (found.taps is None) == (wanted.taps is None)
        assert found.taps is None or torch.equal(found.taps, wanted.taps)
        pair = [one.distributions(row, position)(slice(0, 2)) for one in (found, wanted)]
        for ours, expected in zip(*pair, strict=True):
            assert torch.equal(ours, expected)
    assert source.num_reads == 1


def test_another_batch_is_read_anew(live: LiveSource) -> None:
    source, text = SharedSource(live, (1,)), text_of(0)
    segments = torch.zeros_like(text.input_ids)
    segments[:, 5:] = 1
    for number, other in enumerate((text, text_of(1), text, replace(text, segments=segments))):
        assert torch.equal(source.read(other, (1,)).taps, live.read(other, (1,)).taps)
        assert source.num_reads == number + 1
