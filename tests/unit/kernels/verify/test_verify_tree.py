"""Tree verification: edge cases on the reference and on the Triton kernels. Joint distributions are
those of serve/audit/test_exhaustive_kernels.py and test_audit_kernels.py."""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import partial

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from draftsmith.kernels.constants import MAX_NODES
from draftsmith.kernels.host_compiler import compiler_path
from draftsmith.kernels.sampling.filters import SamplingRows, process
from draftsmith.kernels.sampling.random_streams import Purpose, sample, sample_without_replacement
from draftsmith.kernels.verify.tree import (
    verify_sure_tree,
    verify_sure_tree_compiled,
    verify_tree,
    verify_tree_greedy,
)
from draftsmith.kernels.verify.verdict import DraftTree, TreeVerdict, ancestors, depths, paths
from tests.draft_trees import slot_prefixes
from tests.goodness import g_test

Verify = Callable[..., TreeVerdict]
DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")  # hypothesis takes no fixture
FALSE_ALARM = 1e-6  # seeds are fixed, so that a test passes or fails for good


def triton_small_blocks(*arguments: object) -> TreeVerdict:
    """Blocks of 16 tokens, so that small vocabularies have several."""
    from draftsmith.kernels.verify.tree_triton import verify_tree_triton

    return verify_tree_triton(*arguments, block=16)


@pytest.fixture(params=["torch", "triton"])
def verify(request: pytest.FixtureRequest, device: torch.device, poisoned_empty: None) -> Verify:
    chosen = partial(verify_tree, impl="torch") if request.param == "torch" else triton_small_blocks

    def on_device(p: torch.Tensor, tree: DraftTree, *others: torch.Tensor | None) -> TreeVerdict:
        moved = (None if tensor is None else tensor.to(device) for tensor in others)
        verdict = chosen(p.to(device), DraftTree(*(tensor.to(device) for tensor in tree)), *moved)
        return TreeVerdict(*(tensor.cpu() for tensor in verdict))

    return on_device


def ids(*values: object) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.int64)


def normal(seed: int, *shape: int, scale: float = 1.0) -> torch.Tensor:
    return scale * torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def pair_counts(tokens: torch.Tensor, p: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Counts of the first two tokens over the target's joint distribution; where one was emitted,
    the target adds the second."""
    size = p.shape[1]
    seeds = torch.arange(len(tokens)) + 10**6
    added = sample(p[tokens[:, 0]], seeds, torch.zeros_like(seeds), Purpose.BONUS)
    second = torch.where(tokens[:, 1] < 0, added, tokens[:, 1])
    joint = p[size].softmax(-1)[:, None] * p[:size].softmax(-1)
    return torch.bincount(tokens[:, 0] * size + second, minlength=size * size), joint.flatten()


def random_trees(
    seed: int, rows: int, num_nodes: int, size: int, *, scale: float = 2.0
) -> tuple[object, ...]:
    """Ragged trees of random shape; siblings drawn without replacement from random distributions
    with holes."""
    generator = torch.Generator().manual_seed(seed)
    lengths = torch.randint(0, num_nodes + 1, (rows,), generator=generator)
    parents = torch.stack(
        [torch.randint(-1, max(i // 2, 1), (rows,), generator=generator) for i in range(num_nodes)],
        dim=1,
    )
    seeds = torch.randint(-(2**62), 2**62, (rows,), generator=generator)
    positions = torch.randint(0, 100_000, (rows,), generator=generator)
    p = scale * torch.randn(int((lengths + 1).sum()), size, generator=generator)
    q = scale * torch.randn(rows * (num_nodes + 1), size, generator=generator)
    first = torch.cumsum(lengths + 1, 0) - (lengths + 1)
    for row in range(rows):
        slots = torch.arange(int(lengths[row]) + 1)
        q[row * (num_nodes + 1) + slots] += p[first[row] + slots]
    p[p < -1.5 * scale], q[q < -2 * scale] = -math.inf, -math.inf
    q_rows = torch.arange(rows * (num_nodes + 1)).view(rows, num_nodes + 1)
    tokens = torch.full((rows, num_nodes), -7)
    for row in range(rows):
        for slot in range(num_nodes + 1):
            children = (parents[row] + 1 == slot).nonzero()[:, 0]
            one = slice(row, row + 1)
            distribution = q[q_rows[row, slot]][None]
            tokens[row, children] = sample_without_replacement(
                distribution, seeds[one] + slot, positions[one], Purpose.DRAFT, len(children)
            )
    return p, DraftTree(tokens, parents, lengths), q, q_rows, seeds, positions


def same(one: TreeVerdict, other: TreeVerdict) -> None:
    for ours, theirs in zip(one, other):
        assert torch.equal(ours, theirs)


@pytest.mark.parametrize("size", [2, 49])
@pytest.mark.parametrize("told", ["true q", "deterministic", "mixed"])
def test_triton_decides_as_the_reference(
    size: int, told: str, device: torch.device, poisoned_empty: None
) -> None:
    p, tree, q, q_rows, seeds, positions = random_trees(size, 7, 9, size)
    if told == "mixed":
        q_rows = torch.where((torch.arange(7)[:, None] + torch.arange(10)) % 3 == 0, -1, q_rows)
    distributions = (None, None) if told == "deterministic" else (q.to(device), q_rows.to(device))
    arguments = (
        p.to(device),
        DraftTree(*(t.to(device) for t in tree)),
        *distributions,
        seeds.to(device),
        positions.to(device),
    )
    # The seeds are such that no draw lies within rounding of its threshold.
    reference, ours = verify_tree(*arguments, impl="torch"), triton_small_blocks(*arguments)
    same(ours, reference)
    assert (reference.accepted > 0).any() and (reference.accepted < tree.lengths.to(device)).any()


def test_nodes_that_hang_nowhere_are_passed_over(verify: Verify) -> None:
    """Rows padded to one length with nodes under -2 and logits that are none."""
    p, tree, q, q_rows, *streams = random_trees(5, 4, 5, 21)
    rows = torch.full((4, 6, 21), math.nan)
    rows[torch.arange(6) <= tree.lengths[:, None]] = p
    beyond = torch.arange(5) >= tree.lengths[:, None]
    parents = tree.parents.masked_fill(beyond, -2)
    padded = DraftTree(tree.tokens, parents, torch.full_like(tree.lengths, 5))
    for told in ((q, q_rows), (None, None)):
        expected = verify(p, tree, *told, *streams)
        same(verify(rows.flatten(0, 1), padded, *told, *streams), expected)


def test_children_that_could_not_have_been_drawn_are_passed_over(verify: Verify) -> None:
    """Repeats, placeholders and tokens without mass in q change neither the path nor the token that
    follows, only its node."""
    rows, size = 6, 37
    p, q = normal(31, rows * 3, size), normal(32, rows, size)
    q[:, 5] = -math.inf
    seeds, positions = torch.arange(rows), torch.full((rows,), 4)
    drawn = sample_without_replacement(q, seeds, positions, Purpose.DRAFT, 2)
    lengths = torch.full((rows,), 2)
    q_rows = torch.stack([torch.arange(rows), lengths - 3, lengths - 3], dim=1)
    plain = verify(
        p, DraftTree(drawn, torch.full((rows, 2), -1), lengths), q, q_rows, seeds, positions
    )
    assert plain.accepted.unique().tolist() == [0, 1] and (plain.nodes[:, 0] == 1).any()
    # A uniform belongs to a place among the siblings, so the two draws keep their places.
    both = DraftTree(
        torch.cat([drawn, drawn, torch.full_like(drawn, 5)], dim=1),
        torch.full((rows, 6), -1),
        lengths * 3,
    )
    both.tokens[:, 3] = -1
    root = torch.arange(rows) * 3
    more_p = torch.stack(
        [p[root], p[root + 1], p[root + 2], *(p[root] for _ in range(4))], dim=1
    ).flatten(0, 1)
    more = verify(
        more_p, both, q, torch.nn.functional.pad(q_rows, (0, 4), value=-1), seeds, positions
    )
    assert torch.equal(more.tokens[:, :3], plain.tokens) and torch.equal(
        more.nodes[:, :2], plain.nodes
    )
    first = DraftTree(both.tokens[:, [3, 4, 0, 1]], torch.full((rows, 4), -1), lengths * 2)
    later_p = torch.stack([p[root], p[root], p[root], p[root + 1], p[root + 2]], dim=1).flatten(
        0, 1
    )
    later = verify(
        later_p, first, q, torch.nn.functional.pad(q_rows, (0, 2), value=-1), seeds, positions
    )
    assert (later.nodes != 0).all() and (later.nodes != 1).all() and (later.accepted == 1).any()


def test_a_last_sibling_of_next_to_no_mass(verify: Verify) -> None:
    """q without its first token is the second one alone, at probability exp(-150): drawn all the
    same, and tested with q = 1."""
    rows = 14
    p = torch.tensor([0.25, 0.5, 0.25]).log().repeat(rows * 3, 1)
    q = torch.tensor([0.0, -150.0, -math.inf])
    tree = DraftTree(
        ids([0, 1]).expand(rows, 2), ids([-1, -1]).expand(rows, 2), torch.full((rows,), 2)
    )
    q_rows = ids([0, -1, -1]).expand(rows, 3)
    verdict = verify(p, tree, q[None], q_rows, torch.arange(rows), torch.arange(rows))
    # p(0) = 1/4 stands; otherwise p is 2/3 and 1/3 of tokens 1 and 2, and q = 1 at token 1.
    second = int((verdict.nodes[:, 0] == 1).sum())
    assert 1 <= int((verdict.nodes[:, 0] == 0).sum()) <= 8 and 3 <= second <= 11
    assert (verdict.tokens[verdict.accepted == 0, 0] == 2).all() and (verdict.accepted == 0).any()


def test_narrow_and_strided_logits_are_read_as_they_are(verify: Verify) -> None:
    dtype, size = torch.bfloat16, 45
    p, tree, q, *others = random_trees(39, 3, 5, size)
    p, q = p.to(dtype), q.to(dtype)
    wide_p, wide_q = (
        torch.zeros(len(p), size + 15, dtype=dtype),
        torch.zeros(len(q), size + 15, dtype=dtype),
    )
    own = slice(3, size + 3)
    wide_p[:, own], wide_q[:, own] = p, q
    same(
        verify(wide_p[:, own], tree, wide_q[:, own], *others),
        verify(p.float(), tree, q.float(), *others),
    )


@pytest.mark.parametrize("impl", ["torch", pytest.param("triton", marks=pytest.mark.long)])
@settings(max_examples=25, deadline=None)
@given(data=st.data())
def test_invariants(impl: str, data: st.DataObject) -> None:
    """Length, path, mask, range and determinism, for any tree and any logits hypothesis can think
    of."""
    size, width, rows = (
        data.draw(st.integers(1, 7)),
        data.draw(st.integers(0, 5)),
        data.draw(st.integers(1, 3)),
    )
    number = st.one_of(
        st.floats(-40, 40, width=32), st.sampled_from([math.nan, -math.inf, math.inf])
    )

    def distribution(count: int) -> torch.Tensor:
        values = data.draw(st.lists(number, min_size=count * size, max_size=count * size))
        return torch.tensor(values, dtype=torch.float32).view(count, size)

    def drawn(low: int, high: Callable[[int], int], columns: int) -> torch.Tensor:
        return ids(
            *(data.draw(st.integers(low, high(i))) for _ in range(rows) for i in range(columns))
        ).view(rows, columns)

    tree = DraftTree(
        drawn(-1, lambda i: size - 1, width),
        drawn(-1, lambda i: i - 1, width),
        drawn(0, lambda i: width, 1)[:, 0],
    )
    p, q = distribution(int((tree.lengths + 1).sum())), distribution(3)
    q_rows = drawn(-1, lambda i: 2, width + 1)
    seeds = drawn(-(2**63), lambda i: 2**63 - 1, 1)[:, 0]
    there = DraftTree(*(tensor.to(DEVICE) for tensor in tree))
    p_there, *others = (tensor.to(DEVICE) for tensor in (p, q, q_rows, seeds, torch.arange(rows)))
    arguments = p_there, there, *others
    verdict = verify_tree(*arguments, impl=impl)
    same(verdict, verify_tree(*arguments, impl=impl))
    first = 0
    for row in range(rows):
        kept, tokens, nodes = (
            int(verdict.accepted[row]),
            verdict.tokens[row].tolist(),
            verdict.nodes[row].tolist(),
        )
        assert (
            0 <= kept <= tree.lengths[row]
            and nodes[kept:] == [-1] * (width - kept)
            and tokens[kept + 1 :] == [-1] * (width - kept)
        )
        slots = [0, *(node + 1 for node in nodes[:kept])]
        for parent, node, token in zip(slots, nodes[:kept], tokens):
            assert (
                node < tree.lengths[row]
                and tree.parents[row, node] == parent - 1
                and tree.tokens[row, node] == token
            )
        for slot, token in zip(slots, tokens):
            mass = torch.nan_to_num(p[first + slot], nan=-math.inf, posinf=1.0, neginf=-math.inf)
            if token < 0:
                assert slot == slots[-1] and (mass == -math.inf).all()
            else:
                assert token < size and mass[token] > -math.inf
        first += int(tree.lengths[row]) + 1


def test_siblings_drawn_with_replacement_are_welcome() -> None:
    """Repeats are passed over, and the first occurrences of independent draws are a draw without
    replacement."""
    p, q, rows = normal(4, 7, 6, scale=1.5), normal(5, 7, 6, scale=1.5), 40_000
    seeds, positions = torch.arange(rows), torch.full((rows,), 7)
    start = torch.full((rows,), 6)
    drafts = torch.stack(
        [sample(q[start], seeds + place * 10**6, positions, Purpose.DRAFT) for place in range(3)],
        dim=1,
    )
    assert (drafts[:, 0] == drafts[:, 1]).float().mean() > 0.1
    tree = DraftTree(drafts, torch.full((rows, 3), -1), torch.full((rows,), 3))
    states = torch.cat([start[:, None], drafts], dim=1)
    q_rows = torch.where(torch.arange(4) == 0, states, -1)
    arguments = q_rows, seeds, positions
    verdict = verify_tree(p[states.flatten()], tree, q, *arguments)
    assert g_test(*pair_counts(verdict.tokens, p)).p_value > FALSE_ALARM
    told_wrong = verify_tree(p[states.flatten()], tree, q / 1.5, *arguments)
    assert g_test(*pair_counts(told_wrong.tokens, p)).p_value < FALSE_ALARM


@st.composite
def forests(draw: st.DrawFn) -> list[list[int]]:
    """Parents of up to three trees, empty ones and nodes that hang nowhere included."""
    return [
        [draw(st.integers(-2, node - 1)) for node in range(draw(st.integers(0, 9)))]
        for _ in range(draw(st.integers(1, 3)))
    ]


@given(forests(), st.integers(0, 2**31))
@settings(max_examples=120, deadline=None)
def test_greedy_trees_are_decided_as_those_of_one_hot_distributions(
    forest: list[list[int]], seed: int
) -> None:
    """Few tokens and few logits, so that a good part is kept, siblings repeat and logits are
    equal."""
    generator = torch.Generator().manual_seed(seed)
    width = max(map(len, forest))
    padded = [[*row, *[7] * (width - len(row))] for row in forest]
    parents = torch.tensor(padded, dtype=torch.int64).view(len(forest), width)
    tokens = torch.randint(-1, 3, parents.shape, generator=generator)
    lengths = torch.tensor([len(row) for row in forest])
    tree = DraftTree(tokens, parents, lengths)
    logits = torch.randint(0, 3, (int((lengths + 1).sum()), 3), generator=generator).float()
    for value in (0.0, math.inf, math.nan):
        logits[seed % len(logits), seed % 3] += value
        if seed % 5 == 0:
            logits[-1] += -math.inf
        streams = torch.arange(len(forest)), torch.arange(len(forest))
        one_hot = process(logits, SamplingRows.of([0.0] * len(logits)))
        expected = verify_tree(one_hot, tree, None, None, *streams)
        moved = DraftTree(*(part.to(DEVICE) for part in tree))
        found = verify_tree_greedy(logits.to(DEVICE), moved)
        assert [part.tolist() for part in found] == [part.tolist() for part in expected]
        greedy = SamplingRows.of([0.0] * len(forest))
        compiled = verify_sure_tree(logits, greedy, tree, *streams, all_greedy=True)
        assert [part.tolist() for part in compiled] == [part.tolist() for part in expected]


@pytest.mark.skipif(compiler_path() is None, reason="there is no C++ compiler")
@pytest.mark.parametrize("options", [{}, {"top_k": 9}, {"top_p": 0.9}, {"min_p": 0.02}])
def test_compiled_sure_trees_are_decided_as_by_torch(options: dict[str, float]) -> None:
    kept = decided = 0
    for seed in range(60):
        logits, tree, _, _, *streams = random_trees(seed, 3, 9, 40, scale=1.0)
        tree.tokens[0, 1::3] = tree.tokens[0, 0]  # some of them beside their equals
        rows = SamplingRows.of(
            [0.7, 1.3, 0.0], **{name: [one] * 3 for name, one in options.items()}
        )
        expected = verify_sure_tree(logits, rows, tree, *streams, all_greedy=False, impl="torch")
        found = verify_sure_tree_compiled(logits, rows, tree, *streams, all_greedy=False)
        if found is not None:
            assert [one.tolist() for one in found] == [one.tolist() for one in expected]
            decided, kept = decided + 1, kept + int(found.accepted.sum())
    assert decided >= 50 and kept >= 15


# The form of a tree


def rows(*values: list[int]) -> torch.Tensor:
    return torch.tensor(values)


def test_a_node_that_hangs_nowhere_has_itself_alone() -> None:
    tree = DraftTree(
        rows([5, 6, 7, 8], [1, 2, 99, 99]),
        rows([-1, 0, -2, 1], [-1, -1, 99, -99]),
        torch.tensor([4, 2]),
    )
    assert depths(tree).tolist() == [[0, 1, -1, 2], [0, 0, -1, -1]]
    assert ancestors(tree).tolist() == [[0b11, 0b111, 0b1000, 0b10111], [0b11, 0b101, 8, 16]]
    none = -1
    assert paths(tree).tolist() == [
        [
            [none] * 4,
            [5, none, none, none],
            [5, 6, none, none],
            [none, none, 7, none],
            [5, 6, none, 8],
        ],
        [
            [none] * 4,
            [1, none, none, none],
            [none, 2, none, none],
            [none, none, 99, none],
            [none, none, none, 99],
        ],
    ]


@settings(max_examples=50, deadline=None)
@given(
    st.integers(1, MAX_NODES).flatmap(
        lambda n: st.tuples(*(st.integers(-1, i - 1) for i in range(n)))
    )
)
def test_depths_and_bits_follow_the_parents(parents: tuple[int, ...]) -> None:
    tree = DraftTree(
        torch.zeros(1, len(parents), dtype=torch.int64),
        rows(list(parents)),
        torch.tensor([len(parents)]),
    )
    deep: list[int] = []
    bits: list[int] = []
    for node, parent in enumerate(parents):
        deep.append(0 if parent < 0 else deep[parent] + 1)
        bits.append((1 if parent < 0 else bits[parent]) | 1 << node + 1)
    assert depths(tree).tolist() == [deep] and ancestors(tree).tolist() == [bits]
    assert [len(prefix) for prefix in slot_prefixes(tree)[0]] == [0, *(depth + 1 for depth in deep)]
