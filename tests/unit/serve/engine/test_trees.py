"""Trees between proposal and commit: what is refused, what greedy decoding keeps, and how a kept
path becomes a chain."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from draftsmith.drafters.interface import Proposal
from draftsmith.drafters.trees.layout import NodeLayout
from draftsmith.kernels.attention.pool import PagedPool
from draftsmith.kernels.verify.draft_tree import DraftTree, depths
from draftsmith.serve.engine.round import (
    DraftSource,
    PassOutput,
    RoundProposal,
    RoundTree,
    RowSampling,
)
from draftsmith.serve.engine.runner import pack, place_late
from draftsmith.serve.engine.scheduler import ScheduledRow
from draftsmith.serve.engine.trees import (
    check_tree,
    collapse_to_chain,
    greedy_path,
    lay_out,
    move_kept,
    tree_report,
    tried,
)
from draftsmith.serve.engine.verify import verify_round
from draftsmith.serve.requests.request import Request
from draftsmith.serve.sampling.params import SamplingParams
from tests.draft_trees import ancestor_bits

CPU = torch.device("cpu")


def check(proposal: Proposal, lengths: list[int]) -> tuple[RoundTree, list[bool]] | str:
    assert proposal.parents is not None
    draft = DraftTree(proposal.tokens, proposal.parents, proposal.lengths)
    num_distributions = None if proposal.logits is None else len(proposal.logits)
    report = tree_report(proposal).tolist()
    return check_tree(draft, proposal.q_rows, num_distributions, report, lengths)


@st.composite
def forests(draw: st.DrawFn) -> list[list[int]]:
    """Parents of up to three trees, empty ones included."""
    return [
        [draw(st.integers(-1, node - 1)) for node in range(draw(st.integers(0, 9)))]
        for _ in range(draw(st.integers(1, 3)))
    ]


def round_tree(
    forest: list[list[int]], tokens: list[list[int]], q_rows: torch.Tensor | None = None
) -> RoundTree:
    width = max(map(len, forest))
    pad = [[*parents, *[-1] * (width - len(parents))] for parents in forest]
    values = [[*row, *[-1] * (width - len(row))] for row in tokens]
    shape = (len(forest), width)
    tree = DraftTree(
        torch.tensor(values, dtype=torch.int64).view(shape),
        torch.tensor(pad, dtype=torch.int64).view(shape),
        torch.tensor([len(parents) for parents in forest]),
    )
    return RoundTree(tree, q_rows, forest)


def flags_of(forest: list[list[int]]) -> tuple[list[DraftSource], list[bool], list[bool]]:
    """Rows whose own draft drew every node from a distribution with mass."""
    return [DraftSource.DRAFT] * len(forest), [True] * len(forest), [True] * len(forest)


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


@given(forests(), st.integers(1, 3))
@settings(max_examples=60, deadline=None)
def test_places_and_ancestors_are_those_of_the_tree(forest: list[list[int]], count: int) -> None:
    tree = round_tree(forest, forest)
    laid = lay_out(rows_of(forest, count=count), tree, CPU)
    bits, deep = ancestor_bits(tree.draft), depths(tree.draft)
    token = 0
    for row, parents in enumerate(forest):
        for known in range(count):
            assert laid.positions[token] == int(laid.layout.kv_indices[token]) == 5 + known
            assert int(laid.layout.ancestors[token]) == -1
            token += 1
        for node in range(len(parents)):
            assert int(laid.layout.kv_indices[token]) == 5 + count + node
            assert (
                laid.positions[token] == 5 + count + int(deep[row, node])
                and int(laid.layout.first[token]) == 5 + count - 1
            )
            assert int(laid.layout.ancestors[token]) == int(bits[row, node])
            token += 1
        assert tree.height(row) == max(deep[row].tolist(), default=-1) + 1
    assert token == len(laid.positions)


@given(forests(), st.integers(1, 3), st.integers(0, 2))
@settings(max_examples=60, deadline=None)
def test_trees_of_a_device_are_laid_out_as_those_of_the_host(
    forest: list[list[int]], count: int, spare: int
) -> None:
    """With nodes that hang nowhere in the room that a tree leaves over."""
    width = max(map(len, forest)) + spare
    padded = [[*row, *[-2] * (width - len(row))] for row in forest]
    parents = torch.tensor(padded, dtype=torch.int64).view(len(forest), width)
    tree = DraftTree(torch.zeros_like(parents), parents, torch.full((len(forest),), width))
    rows = rows_of(forest, count=count)
    chains = [[0] * width for _ in forest]
    packed = pack(rows, chains)
    positions = torch.tensor(packed.positions)
    late = place_late(rows, chains, packed.begins, tree.tokens)
    found = NodeLayout.of(tree).lay_out(
        positions, torch.tensor(late.sources).long(), torch.tensor(late.places).long()
    )
    laid = lay_out(rows, round_tree(forest, forest), CPU)
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


@given(forests(), st.integers(0, 2**31))
@settings(max_examples=80, deadline=None)
def test_greedy_trees_are_decided_as_verification_of_one_hot_distributions(
    forest: list[list[int]], seed: int
) -> None:
    generator = torch.Generator().manual_seed(seed)
    # Few tokens, so that a good part is kept and siblings repeat.
    tokens = [
        torch.randint(0, 3, (len(parents),), generator=generator).tolist() for parents in forest
    ]
    logits = torch.randint(
        0, 3, (sum(map(len, forest)) + len(forest) + 1, 3), generator=generator
    ).float()
    tree = round_tree(forest, tokens)
    drafts = RoundProposal(
        tokens, *flags_of(forest), tree.draft.tokens, tree.draft.lengths, None, tree
    )
    # One more row that drafts nothing.
    rows = rows_of([*forest, []])
    chains = [*tokens, []]
    streams = RowSampling(rows, CPU)
    short = verify_round(logits, chains, drafts, streams)
    streams.all_greedy = False
    assert short == verify_round(logits, chains, drafts, streams)
    assert len(short.paths) == len(rows) and all(
        len(e) == len(p) + 1 for e, p in zip(short.emitted, short.paths)
    )


def test_greedy_path_takes_the_child_that_the_target_chooses() -> None:
    tokens, parents = [4, 5, 6, 7, 8], [-1, -1, 1, 1, 3]
    assert greedy_path(tokens, parents, [5, 0, 7, 0, 8, 1]) == [1, 3, 4]
    assert greedy_path(tokens, parents, [9, 0, 7, 0, 8, 1]) == []
    assert (
        tried(parents, [1]) == [1, 2]
        and tried(parents, [1, 3, 4]) == [1, 3, 4]
        and tried(parents, []) == [0]
    )


@given(forests(), st.integers(0, 2**31))
@settings(max_examples=60, deadline=None)
def test_a_kept_path_becomes_a_chain(forest: list[list[int]], seed: int) -> None:
    """Every row of logits, taps and distributions goes with its node; nothing of a row lands in
    another."""
    generator = torch.Generator().manual_seed(seed)
    tokens = [list(range(10 * row, 10 * row + len(parents))) for row, parents in enumerate(forest)]
    paths = []
    for parents in forest:
        node = int(torch.randint(-1, len(parents), (1,), generator=generator)) if parents else -1
        path: list[int] = []
        while node >= 0:
            path.insert(0, node)
            node = parents[node]
        paths.append(path)
    width = max(map(len, forest))
    slots = sum(len(parents) + 1 for parents in forest)
    q_rows = torch.randint(-1, slots, (len(forest), width + 1), generator=generator)
    q_logits = torch.randn(slots, 40, generator=generator)
    tree = round_tree(forest, tokens, q_rows)
    drafts = RoundProposal(
        tokens, *flags_of(forest), tree.draft.tokens, tree.draft.lengths, q_logits, tree
    )
    rows = rows_of([*forest, []], count=2)
    filling = ScheduledRow(rows[-1].request, 0, 3)  # a piece of a prompt, which decides nothing
    rows = [*rows, filling]
    chains = [*tokens, [], []]
    begins, total = [], 0
    for row, chain in zip(rows, chains):
        begins.append(total)
        total += row.count + len(chain)
    logits = torch.arange(slots + 1, dtype=torch.float32)[:, None].repeat(1, 4)
    taps = torch.arange(total, dtype=torch.float32)[:, None]
    output = PassOutput(logits, taps, begins, torch.empty(0, 4))
    straight = collapse_to_chain(rows, drafts, output, [*paths, []], with_distributions=True)
    begin_logits = new_logits = 0
    for row, (parents, path) in enumerate(zip(forest, paths)):
        kept = tried(parents, path)
        assert straight.proposal.chains[row] == [tokens[row][node] for node in kept]
        wanted = [begin_logits, *(begin_logits + 1 + node for node in kept)]
        found = straight.output.logits[new_logits : new_logits + len(kept) + 1, 0].tolist()
        assert found == wanted
        begin_logits += len(parents) + 1
        new_logits += len(kept) + 1
        begin = straight.output.begins[row]
        at = [begins[row], begins[row] + 1, *(begins[row] + 2 + node for node in kept)]
        assert straight.output.taps[begin : begin + len(at), 0].tolist() == at
        for step, node in enumerate(kept):
            distribution = int(q_rows[row, parents[node] + 1])
            told = straight.proposal.logits[row, step]
            if distribution >= 0:
                assert torch.equal(told, q_logits[distribution])
            else:
                assert told.isfinite().nonzero()[:, 0].tolist() == [tokens[row][node]]
    assert straight.output.logits[new_logits:, 0].tolist() == [begin_logits]
    last = straight.output.begins[-1]
    assert straight.output.taps[last:, 0].tolist() == list(range(begins[-1], begins[-1] + 3))
    assert straight.proposal.offered(0) == tree.height(0) and straight.proposal.offered(99) == 0


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
    "parents, wrong", [([[1, -1]], "after their parents"), ([[-2, 0]], "after their parents")]
)
def test_malformed_trees_are_refused(parents: list[list[int]], wrong: str) -> None:
    proposal = Proposal(
        tokens=torch.tensor([[1, 2]]),
        lengths=torch.tensor([2]),
        logits=None,
        parents=torch.tensor(parents),
    )
    checked = check(proposal, [2])
    assert isinstance(checked, str) and wrong in checked


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
    assert check(Proposal(**common), [3] * 3) == "distributions without telling whose they are"
    assert isinstance(check(Proposal(**common, q_rows=torch.full((3, 4), 3)), [3] * 3), str)
    q_rows = torch.tensor([[0, 0, -1, -1], [0, 1, -1, -1], [0, 2, -1, -1]])
    checked = check(Proposal(**common, q_rows=q_rows), [3] * 3)
    assert not isinstance(checked, str) and checked[1] == [True, False, False]
    # Deterministic children have no distribution to fail.
    checked = check(Proposal(**common, q_rows=torch.full((3, 4), -1)), [3] * 3)
    assert not isinstance(checked, str) and checked[1] == [True] * 3


def test_what_lies_beyond_a_trees_length_is_no_failure() -> None:
    """Row 0 has no node, row 1 one of a sound distribution."""
    proposal = Proposal(
        tokens=torch.tensor([[10**6, 10**6], [2, -(10**6)]]),
        lengths=torch.tensor([0, 1]),
        logits=torch.zeros(1, 5),
        parents=torch.tensor([[10**6, -7], [-1, 10**6]]),
        q_rows=torch.tensor([[-1, -1, -1], [0, -1, -1]]),
    )
    checked = check(proposal, [0, 1])
    assert not isinstance(checked, str) and checked[1] == [True, True]
