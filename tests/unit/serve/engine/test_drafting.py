"""What becomes of a proposal that is broken in part."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch

from draftsmith.drafters.interface import DraftInputs, Proposal, ServingDrafter
from draftsmith.kernels.dispatch import Upload
from draftsmith.kernels.sampling.filters import SamplingRows
from draftsmith.serve.drafts.draft_set import DraftSet
from draftsmith.serve.engine.proposal import DraftCheck, Drafted, RoundProposal
from draftsmith.serve.engine.propose import Proposer
from draftsmith.serve.requests.request import LIVE, DraftState, Request, RequestOptions
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


class Padded:
    """Row 0 drafted nothing and row 1 one token; what follows is no id."""

    family = "padded"
    taps: tuple[int, ...] = ()

    def propose(self, inputs: DraftInputs) -> Proposal:
        tokens = torch.tensor([[10**6, -(10**6)], [3, 10**6], [5, 6]])
        logits = torch.zeros(3, 2, 8)
        logits[0], logits[1, 1] = torch.nan, torch.nan
        return Proposal(tokens=tokens, lengths=torch.tensor([0, 1, 2]), logits=logits)


def proposer_of(drafter: ServingDrafter) -> Proposer:
    stats, unused = EngineStats(), cast(Any, None)
    drafts = DraftSet(drafter, unused, stats, make_ready=unused, requests=unused)
    return Proposer(drafts, None, vocab_size=8)


def proposed(drafter: ServingDrafter) -> RoundProposal:
    request = SimpleNamespace(
        id="a",
        tokens=[1, 2, 3],
        draft=DraftState(),
        num_tokens=3,
        repeatable=False,
        draft_name=LIVE,
    )
    rows = [SimpleNamespace(request=request, k=2) for _ in range(3)]
    drafts = proposer_of(drafter).propose(
        rows,
        torch.zeros(3, 1, dtype=torch.int64),
        SamplingRows.of([1.0] * 3),
        torch.arange(3),
        torch.tensor([2, 2, 2]),
        upload=Upload(torch.device("cpu")),
    )
    assert drafts is not None
    return drafts


def read(drafter: ServingDrafter) -> Drafted:
    proposal = proposed(drafter)
    report = torch.cat(proposal.report, dim=1).tolist()
    return Drafted.of(proposal, report, [2] * len(proposal.sizes), vocab_size=8)


def test_what_lies_beyond_a_length_is_no_failure() -> None:
    drafted = read(Padded())
    assert drafted.chains == [[], [3], [5, 6]] and drafted.checks == [DraftCheck.SOUND] * 3


def test_tokens_before_a_broken_distribution_are_still_verified() -> None:
    drafted = read(BrokenLater())
    assert drafted.chains == [[1, 2], [3], []]
    assert [drafted.is_read(row) for row in range(3)] == [True, False, False]


class Strange:
    """Row 0 ends with a token that is none, row 1 has more tokens than were asked for, row 2 is
    sound."""

    family = "strange"
    taps: tuple[int, ...] = ()

    def propose(self, inputs: DraftInputs) -> Proposal:
        tokens = torch.tensor([[1, 8, 0], [3, 4, 5], [5, 6, -1]])
        return Proposal(tokens=tokens, lengths=torch.tensor([2, 3, 2]), logits=None)


def test_tokens_that_were_not_asked_for_are_left_out() -> None:
    drafted = read(Strange())
    assert drafted.chains == [[1], [3, 4], [5, 6]]
    assert drafted.checks == [DraftCheck.MALFORMED, DraftCheck.MALFORMED, DraftCheck.SOUND]
    assert [drafted.is_read(row) for row in range(4)] == [False, False, True, False]


class Greedy:
    """Row 1 has no distribution at depth 1; a greedy draft tells no distributions."""

    family = "greedy"
    taps: tuple[int, ...] = ()

    def propose(self, inputs: DraftInputs) -> Proposal:
        sound = torch.tensor([[True, True], [True, False], [True, True]])
        tokens = torch.tensor([[1, 2], [3, 4], [5, 6]])
        return Proposal(tokens=tokens, lengths=torch.tensor([2, 2, 1]), logits=None, has_mass=sound)


def test_a_greedy_draft_says_where_a_distribution_was_broken() -> None:
    drafted = read(Greedy())
    assert drafted.chains == [[1, 2], [3], [5]] and not any(drafted.drawn)
    assert [drafted.is_read(row) for row in range(3)] == [True, False, True]


class Remembers(Greedy):
    """Keeps what it is given of finished requests."""

    def __init__(self) -> None:
        self.texts: list[list[int]] = []

    def finished(self, request_id: str, tokens: list[int]) -> None:
        self.texts.append(tokens)


@pytest.mark.parametrize("params, learn, kept", [
    (SamplingParams(temperature=1.0), True, [1, 2, 3]),
    (SamplingParams(temperature=0.0, seed=3), True, [1, 2, 3]),
    # another with that seed would be drafted from its own draws
    (SamplingParams(temperature=1.0, seed=3), True, []),
    (SamplingParams(temperature=1.0), False, []),
])  # fmt: skip
def test_text_that_may_not_be_shared_is_not_kept(
    params: SamplingParams, learn: bool, kept: list[int]
) -> None:
    drafter = Remembers()
    request = Request(
        "a", [1, 2, 3], 1, params, seed=3, k=2, max_tokens=9, options=RequestOptions(learn=learn)
    )
    proposer_of(drafter).finished(request)
    assert drafter.texts == [kept]
