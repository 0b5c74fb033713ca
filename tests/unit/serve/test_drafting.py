"""What becomes of a proposal that is broken in part."""

from __future__ import annotations

from types import SimpleNamespace

import torch

from draftsmith.drafters.interface import DraftInputs, Proposal
from draftsmith.kernels.filters import SamplingRows
from draftsmith.serve.drafting import Drafting
from draftsmith.serve.stats import EngineStats


class BrokenLater:
    """Row 0 is sound, row 1 has no law at depth 1, row 2 none at depth 0."""

    family = "broken later"
    taps: tuple[int, ...] = ()

    def propose(self, inputs: DraftInputs) -> Proposal:
        logits = torch.zeros(3, 2, 8)
        logits[1, 1] = torch.nan
        logits[2, 0] = -torch.inf
        return Proposal(tokens=torch.tensor([[1, 2], [3, 4], [5, 6]]), lengths=torch.tensor([2, 2, 2]), logits=logits)


def test_tokens_before_a_broken_law_are_still_verified() -> None:
    request = SimpleNamespace(id="a", tokens=[1, 2, 3], draft_cached=0, num_tokens=3, taps=[])
    rows = [SimpleNamespace(request=request, k=2) for _ in range(3)]
    drafting = Drafting(BrokenLater(), None, EngineStats(), vocab_size=8)
    drafts = drafting.propose(rows, torch.zeros(3, 1, dtype=torch.int64), SamplingRows.of([1.0] * 3), torch.arange(3))
    assert drafts is not None
    assert drafts.chains == [[1, 2], [3], []]
    assert drafts.lengths.tolist() == [2, 1, 0]
    assert drafts.sound == [True, False, False]
