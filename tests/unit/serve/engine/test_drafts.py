"""Proposals of several drafts become the one of the round."""

from __future__ import annotations

import pytest
import torch

from draftsmith.drafters.interface import Proposal
from draftsmith.serve.engine.proposal import (
    DraftCheck,
    Drafted,
    DraftSource,
    Part,
    RoundProposal,
    checked,
    joined,
)
from tests.draft_trees import slot_prefixes

VOCAB = 8


def read(proposal: RoundProposal) -> Drafted:
    """As the host reads it."""
    report = torch.cat(proposal.report, dim=1).tolist()
    return Drafted.of(proposal, report, [9] * len(report), VOCAB)


def check(proposal: Proposal, width: int, *, trees: bool = False) -> RoundProposal:
    count = len(proposal.tokens)
    return checked(proposal, [width] * count, torch.full((count,), width), VOCAB, trees=trees)


NONE: frozenset[int] = frozenset()


def chains(
    *rows: list[int],
    drawn: bool = True,
    width: int = 0,
    copied: frozenset[int] = NONE,
) -> RoundProposal:
    """Distributions that name their row: its number is every logit's."""
    width = max([width, *map(len, rows)])
    tokens = torch.tensor([[*row, *[-1] * (width - len(row))] for row in rows])
    logits = (
        torch.arange(float(len(rows)))[:, None, None].expand(-1, width, VOCAB) if drawn else None
    )
    proposal = Proposal(
        tokens=tokens,
        lengths=torch.tensor([len(row) for row in rows]),
        logits=logits,
        copied=copied,
    )
    return check(proposal, width)


def test_every_row_gets_its_own_drafts_and_distributions() -> None:
    found = joined([Part([3, 0], chains([1, 2, 3], [4])), Part([2], chains([5, 6], width=2))], 5)
    drafted = read(found)
    assert drafted.chains == [[4], [], [5, 6], [1, 2, 3], []]
    assert found.sizes == found.held.tolist() == found.usable.tolist() == [1, 0, 2, 3, 0]
    assert [drafted.is_read(row) for row in range(5)] == [True, False, True, True, False]
    assert found.logits is not None and found.logits.shape == (5, 3, VOCAB)
    assert [found.logits[row, 0, 0].item() for row in (0, 2, 3)] == [1.0, 0.0, 0.0]
    assert bool((found.logits[1] == -torch.inf).all()) and bool(
        (found.logits[2, 2] == -torch.inf).all()
    )
    assert found.drawn == [True, False, True, True, False]


def test_rows_that_were_not_drawn_have_one_hot_distributions_beside_those_that_were() -> None:
    found = joined(
        [
            Part([0], chains([5, 6], drawn=False)),
            Part([1, 2], chains([1], [2, 3], copied=frozenset({1}))),
        ],
        3,
    )
    assert found.logits is not None
    expected = torch.full((2, VOCAB), -torch.inf)
    expected[0, 5] = expected[1, 6] = 0.0
    assert torch.equal(found.logits[0], expected)
    assert found.drawn == [False, True, False]
    assert [read(found).by_its_draft(row) for row in range(4)] == [True, True, False, False]
    silent = joined([Part([1], chains([5], drawn=False)), Part([0], chains([1], drawn=False))], 2)
    assert silent.logits is None and not any(silent.drawn) and read(silent).chains == [[1], [5]]


def test_a_broken_distribution_and_a_stand_in_stay_with_their_rows() -> None:
    logits = torch.zeros(2, 1, VOCAB)
    logits[1] = torch.nan
    broken = check(
        Proposal(tokens=torch.tensor([[1], [2]]), lengths=torch.tensor([1, 1]), logits=logits), 1
    )
    found = joined([Part([2, 0], broken), Part([1], chains([3]))], 3)
    drafted = read(found)
    assert drafted.chains == [[], [3], [1]] and DraftSource.NONE not in drafted.sources
    assert drafted.checks == [DraftCheck.NO_MASS, DraftCheck.SOUND, DraftCheck.SOUND]


def tree(parents: list[list[int]], distributions: list[list[int]] | None) -> RoundProposal:
    """Token i + 1 at node i; `distributions` the row of each slot's distribution, of as many
    distributions as are named."""
    width = max(map(len, parents))
    tokens = torch.tensor([[*range(1, len(row) + 1), *[0] * (width - len(row))] for row in parents])
    given = (
        None
        if distributions is None
        else torch.arange(1.0 + max(map(max, distributions)))[:, None].expand(-1, VOCAB)
    )
    proposal = Proposal(
        tokens=tokens,
        lengths=torch.tensor([len(row) for row in parents]),
        logits=given,
        parents=torch.tensor([[*row, *[-1] * (width - len(row))] for row in parents]),
        q_rows=None if distributions is None else torch.tensor(distributions),
    )
    return check(proposal, width, trees=True)


@pytest.mark.parametrize("drawn", [True, False])
def test_trees_keep_their_shape_and_their_distributions(drawn: bool) -> None:
    first = tree([[-1, -1, 0]], [[0, 1, -1, -1]])
    second = tree([[-1], [-1, 0]], [[0, -1, -1], [1, 2, -1]] if drawn else None)
    chain = tree([[-1, 0]], None)
    found = joined([Part([3], first), Part([0, 2], second), Part([1], chain)], 5)
    drafted = read(found)
    assert drafted.parents == [[-1], [-1, 0], [-1, 0], [-1, -1, 0], []]
    assert found.tree is not None
    assert slot_prefixes(found.tree)[1] == [[], [1], [1, 2]]
    assert [drafted.offered(row) for row in range(5)] == [1, 2, 2, 2, 0]
    assert found.logits is not None and found.nodes is not None
    told = found.nodes.q_rows
    assert told is not None
    assert told[1].tolist() == [-1] * 4 == told[4].tolist()
    # The distribution of a slot is still the one it was.
    assert [found.logits[distribution, 0].item() for distribution in told[3].tolist()[:2]] == [
        0.0,
        1.0,
    ]
    if drawn:
        assert [found.logits[distribution, 0].item() for distribution in told[2].tolist()[:2]] == [
            1.0,
            2.0,
        ] and told[0, 0] == 2
    else:
        assert told[2].tolist() == [-1] * 4
