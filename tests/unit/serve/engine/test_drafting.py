"""What becomes of a proposal that is broken in part."""

from __future__ import annotations

from typing import Any, cast

import torch

from draftsmith.drafters.interface import DraftInputs, Proposal
from draftsmith.kernels.dispatch import Upload
from draftsmith.serve.engine.live_draft import LiveDraft
from draftsmith.serve.engine.proposal import Drafted
from draftsmith.serve.engine.propose import Proposer
from draftsmith.serve.engine.round import Round, RowSampling
from draftsmith.serve.engine.scheduler import Schedule, ScheduledRow
from draftsmith.serve.requests.request import Request
from draftsmith.serve.sampling.params import SamplingParams
from draftsmith.serve.stats import EngineStats


class BrokenLater:
    """Row 0 is sound, row 1 has no distribution at depth 1, row 2 none at depth 0."""

    family = "broken later"
    taps: tuple[int, ...] = ()

    def propose(self, inputs: DraftInputs) -> Proposal:
        logits = torch.zeros(3, 2, 8)
        logits[1, 1] = torch.nan
        logits[2, 0] = -torch.inf
        return Proposal(
            tokens=torch.tensor([[1, 2], [3, 4], [5, 6]]),
            lengths=torch.tensor([2, 2, 2]),
            logits=logits,
        )


def test_tokens_before_a_broken_distribution_are_still_verified() -> None:
    request = Request("a", [1, 2, 3], 3, SamplingParams(), seed=0, k=2, max_tokens=9)
    rows = [ScheduledRow(request, 2, 1, 2) for _ in range(3)]
    cpu = torch.device("cpu")
    tables = torch.zeros(3, 1, dtype=torch.int64)
    round = Round(Schedule(rows), rows, tables, RowSampling(rows, cpu), 0, 0.0, Upload(cpu))
    draft = LiveDraft(BrokenLater(), cast(Any, None), EngineStats())
    proposal = Proposer(draft, None, vocab_size=8).propose(round)
    assert proposal is not None
    report = torch.cat(proposal.report, dim=1).tolist()
    drafted = Drafted.of(proposal, report, [2] * len(proposal.sizes), vocab_size=8)
    assert drafted.chains == [[1, 2], [3], []]
    assert [drafted.is_read(row) for row in range(3)] == [True, False, False]
