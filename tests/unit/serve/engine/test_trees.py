"""Trees between proposal and commit: where their nodes are in a pass, what is refused, and how a
kept path becomes a chain."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from draftsmith.drafters.interface import Proposal
from draftsmith.drafters.trees.nodes import NodeLayout
from draftsmith.kernels.attention.pool import PagedPool
from draftsmith.kernels.dispatch import sent
from draftsmith.kernels.verify.verdict import DraftTree, depths
from draftsmith.serve.engine.proposal import BadProposal, DraftCheck, Drafted, checked
from draftsmith.serve.engine.runner import pack
from draftsmith.serve.engine.scheduler import ScheduledRow
from draftsmith.serve.engine.verify import move_kept
from draftsmith.serve.requests.request import Request
from draftsmith.serve.sampling.params import SamplingParams
from tests import device_stand_in
from tests.device_stand_in import on_device
from tests.speculate_trees import TreeSpan, tree_pass

CPU = torch.device("cpu")


def check(proposal: Proposal) -> Drafted:
    """As the host reads it."""
    count, width = proposal.tokens.shape
    allowed = [width] * count
    found = checked(proposal, allowed, torch.tensor(allowed), 5, trees=True)
    return Drafted.of(found, torch.cat(found.report, dim=1).tolist(), allowed, 5)


@st.composite
def forests(draw: st.DrawFn) -> list[list[int]]:
    """Parents of up to three trees, empty ones included."""
    return [
        [draw(st.integers(-1, node - 1)) for node in range(draw(st.integers(0, 9)))]
        for _ in range(draw(st.integers(1, 3)))
    ]


def rows_of(
    forest: list[list[int]], *, begin: int = 5, count: int = 1, temperature: float = 0.0
) -> list[ScheduledRow]:
    params = SamplingParams(temperature=temperature)
    requests = [
        Request(f"{i}", list(range(begin + count)), 1, params, seed=i, k=9, max_tokens=99)
        for i in range(len(forest))
    ]
    return [
        ScheduledRow(request, begin, count, len(parents))
        for request, parents in zip(requests, forest)
    ]


@given(forests(), st.integers(1, 3), st.integers(0, 2))
@settings(max_examples=60, deadline=None)
def test_trees_of_a_device_are_laid_out_as_those_of_the_host(
    forest: list[list[int]], count: int, spare: int
) -> None:
    """With nodes that hang nowhere behind those of a tree."""
    width = max(map(len, forest)) + spare
    padded = [[*row, *[-2] * (width - len(row))] for row in forest]
    parents = torch.tensor(padded, dtype=torch.int64).view(len(forest), width)
    tree = DraftTree(torch.zeros_like(parents), parents, torch.full((len(forest),), width))
    rows = rows_of(forest, count=count)
    packed = pack(rows, [width] * len(rows), width, torch.empty(0))
    positions = torch.tensor(packed.positions)
    found = NodeLayout.of(tree).lay_out(positions, *sent(CPU, *(packed.moves or ([], []))))
    laid = tree_pass(
        [TreeSpan(row.begin, row.count, own) for row, own in zip(rows, forest, strict=True)], CPU
    )
    at = [
        token
        for begin, own in zip(packed.begins, forest)
        for token in range(begin, begin + count + len(own))
    ]
    assert positions[at].tolist() == laid.positions
    assert found.kv_indices.tolist() == packed.positions
    assert found.kv_indices[at].tolist() == laid.layout.kv_indices.tolist()
    assert found.ancestors[at].tolist() == laid.layout.ancestors.tolist()
    in_tree = laid.layout.ancestors >= 0
    assert torch.equal(found.first[at][in_tree], laid.layout.first[in_tree])
    # Padding sees the text and itself.
    padding = sorted({*range(len(positions))} - {*at})
    assert all(int(bits).bit_count() == 1 for bits in found.ancestors[padding])


def test_keys_of_kept_nodes_move_in_all_rows_at_once() -> None:
    pool = PagedPool.empty(num_layers=1, num_blocks=9, block_size=4, num_kv_heads=1, key_dim=2)
    tables = torch.tensor([[3, 1, 2, 4], [8, 7, 6, 5]])
    for row in range(2):
        slots = pool.slots_of(tables, row, torch.arange(16))
        for tensor in (*pool.keys, *pool.values):
            tensor[slots] = (100 * row + torch.arange(16.0))[:, None, None].expand(-1, 1, 2)
    forest = [[-1, -1, 1, 2], [-1, 0, -1, 2]]
    move_kept(pool, tables, rows_of(forest), [[1, 2, 3], [2, 3]])
    for row, wanted in enumerate([[7, 8, 9, 9], [8, 9, 8, 9]]):
        places = torch.arange(6, 10)
        for tensor in (*pool.keys, *pool.values):
            assert tensor[pool.slots_of(tables, row, places), 0, 0].tolist() == [
                100 * row + value for value in wanted
            ]


@pytest.mark.parametrize(
    "parents, expected",
    [
        (None, [[], [4], [4, 5], [4, 5, 6], []]),
        ([-1, -1, 1, 0], [[], [4], [5], [5, 6], [4, 7], []]),
    ],
)
def test_rows_of_logits_are_adjusted_behind_their_own_branch(
    parents: list[int] | None, expected: list[list[int]]
) -> None:
    """Those of a drafting row, and that of one which did not draft."""
    tokens = torch.tensor([[4, 5, 6, 7][: len(expected) - 2]])
    above = None if parents is None else torch.tensor([parents])
    proposal = Proposal(
        tokens=tokens, lengths=torch.tensor([tokens.shape[1]]), logits=None, parents=above
    )
    found = checked(
        proposal, [tokens.shape[1]], proposal.lengths, 9, trees=parents is not None
    ).before(
        torch.tensor([0] * (len(expected) - 1) + [1]), torch.tensor([*range(len(expected) - 1), 0])
    )
    assert [[token for token in row if token >= 0] for row in found.tolist()] == expected


@pytest.mark.parametrize("parents", [[1, -1], [-2, 0], [-1, 1]])
def test_malformed_trees_are_refused_row_by_row(
    parents: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    proposal = Proposal(
        tokens=torch.tensor([[1, 2], [3, 4]]),
        lengths=torch.tensor([2, 2]),
        logits=None,
        parents=torch.tensor([parents, [-1, 0]]),
    )
    found = check(proposal)
    assert found.checks == [DraftCheck.MALFORMED, DraftCheck.SOUND]
    assert found.chains == [[], [3, 4]] and found.parents == [[], [-1, 0]]
    with device_stand_in.device(monkeypatch):
        there = replace(
            proposal,
            tokens=on_device(proposal.tokens),
            lengths=on_device(proposal.lengths),
            parents=on_device(proposal.parents),
        )
        tree = checked(there, [2, 2], on_device(proposal.lengths), 5, trees=True).tree
        # The pass has the nodes of both, and those of the first hang nowhere.
        assert tree is not None and tree.lengths.tolist() == [2, 2]
        assert depths(tree).tolist() == [[-1, -1], [0, 1]]


def test_distributions_must_say_whose_they_are_and_have_mass() -> None:
    tokens, parents = torch.tensor([[1, 2, 3]] * 3), torch.tensor([[-1, 0, 0]] * 3)
    logits = torch.zeros(3, 5)
    logits[1] = torch.nan
    logits[2, 3] = -torch.inf  # the distribution that token 3 was not drawn from
    common = {
        "tokens": tokens,
        "lengths": torch.tensor([3, 3, 3]),
        "logits": logits,
        "parents": parents,
    }
    with pytest.raises(BadProposal, match="whose they are"):
        check(Proposal(**common))
    strangers = check(Proposal(**common, q_rows=torch.full((3, 4), 3)))
    assert strangers.checks == [DraftCheck.MALFORMED] * 3
    q_rows = torch.tensor([[0, 0, -1, -1], [0, 1, -1, -1], [0, 2, -1, -1]])
    found = check(Proposal(**common, q_rows=q_rows))
    assert found.checks == [DraftCheck.SOUND, DraftCheck.NO_MASS, DraftCheck.NO_MASS]
    assert found.chains == [[1, 2, 3]] * 3  # verification passes over the nodes
    # Deterministic children have no distribution to fail.
    found = check(Proposal(**common, q_rows=torch.full((3, 4), -1)))
    assert found.checks == [DraftCheck.SOUND] * 3
