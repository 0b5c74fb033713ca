"""Trees of feature heads against the same trees grown by hand from unrolled distributions: no
cache, no batch, no masks."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import lru_cache

import pytest
import torch

from draftsmith.drafters.interface import Proposal
from draftsmith.drafters.target.target import Target
from draftsmith.drafters.tree_shape import (
    DynamicTree,
    SampledShape,
    SampledTree,
    TreeShape,
    parse_tree,
)
from draftsmith.errors import UserError
from draftsmith.kernels.sampling.filters import SamplingRows, process
from draftsmith.kernels.sampling.random_streams import Purpose, sample_without_replacement
from draftsmith.kernels.verify.verdict import DraftTree
from tests.draft_trees import slot_prefixes, well_formed
from tests.first_rounds import first_round
from tests.small_drafts import small_draft
from tests.unrolled import unrolled_logits

TARGET_DTYPE = torch.float64
BLOCK = 4
KINDS = ("eagle3 subset", "eagle1", "mtp")
SIZES = (9, 21, 6)  # of the texts; their caches hold all but the last few positions
STARTS = (0, 18, 4)


@pytest.fixture(scope="module", params=KINDS)
def drafter(request: pytest.FixtureRequest, target: Target):
    return small_draft(request.param, target)


@pytest.fixture(scope="module")
def texts(target: Target) -> list[list[int]]:
    generator = torch.Generator().manual_seed(3)
    return [
        torch.randint(3, target.vocab_size, (size,), generator=generator).tolist() for size in SIZES
    ]


def propose(
    drafter,
    target: Target,
    texts: list[list[int]],
    num_draft: Sequence[int],
    temperatures: Sequence[float],
    shape: TreeShape,
) -> Proposal:
    """One call over all texts, once the caches hold `STARTS` positions."""
    width = -(-(max(SIZES) + 80) // BLOCK)
    tables = 1 + torch.randperm(
        len(texts) * width, generator=torch.Generator().manual_seed(4)
    ).view(len(texts), width)
    pool = drafter.new_pool(tables.numel() + 1, BLOCK, torch.device("cpu"), torch.float64)
    for tensor in (*pool.keys, *pool.values):
        tensor[BLOCK:] = torch.nan

    def proposed(starts: Sequence[int], ends: Sequence[int], num_draft: Sequence[int]) -> Proposal:
        inputs = first_round(
            drafter,
            target,
            [text[:end] for text, end in zip(texts, ends)],
            num_draft,
            starts,
            sampling=SamplingRows.of(temperatures, top_k=[7] * len(texts)),
            pool=pool,
            block_tables=tables,
        )
        return drafter.propose_tree(inputs, shape)

    proposed([0] * len(texts), [start + 1 for start in STARTS], [0] * len(texts))
    return proposed(STARTS, SIZES, num_draft)


def make_distribution(
    drafter, target: Target, text: list[int]
) -> Callable[[tuple[int, ...]], torch.Tensor]:
    @lru_cache
    def distribution(path: tuple[int, ...]) -> torch.Tensor:
        """[V] raw draft logits of the token after `path`, all of it drafted, by unrolling."""
        return unrolled_logits(drafter, target, text, [*path, 0])[-1]

    return distribution


def dynamic_paths(distribution: Callable, shape: DynamicTree, budget: int) -> list[tuple[int, ...]]:
    """EAGLE-2 with Python's sorting."""
    found: dict[tuple[int, ...], float] = {}
    width = max(1, min(shape.width, (budget + 1) // max(shape.depth - 1, 1)))
    beams: dict[tuple[int, ...], float] = {(): 0.0}
    for _ in range(min(shape.depth, budget)):
        children: dict[tuple[int, ...], float] = {}
        for path, worth in beams.items():
            best = torch.log_softmax(distribution(path).float(), -1).topk(shape.width)
            children |= {
                (*path, token): worth + gain
                for token, gain in zip(best.indices.tolist(), best.values.tolist())
            }
        found |= children
        beams = dict(sorted(children.items(), key=lambda pair: -pair[1])[:width])
    return sorted(found, key=lambda path: -found[path])[:budget]


def paths_of(proposal: Proposal) -> list[list[tuple[int, ...]]]:
    tree = DraftTree(proposal.tokens, proposal.parents, proposal.lengths)
    assert well_formed(tree).all()
    return [[tuple(path) for path in row[1:]] for row in slot_prefixes(tree)]


@pytest.mark.parametrize(
    "shape",
    [
        DynamicTree(),
        DynamicTree(nodes=10, depth=6, width=2),
        DynamicTree(nodes=7, depth=1, width=9),
    ],
)
def test_dynamic_trees_hold_the_likeliest_nodes(
    drafter, target: Target, texts: list[list[int]], shape: DynamicTree
) -> None:
    budgets = (60, 5, 2)
    proposal = propose(drafter, target, texts, budgets, (0.0, 0.0, 0.0), shape)
    assert proposal.logits is None
    for text, budget, paths in zip(texts, budgets, paths_of(proposal)):
        expected = dynamic_paths(
            make_distribution(drafter, target, text), shape, min(budget, shape.nodes)
        )
        assert set(paths) == set(expected) and len(paths) == len(expected)


def test_a_sampled_request_ranks_by_its_own_distribution(
    drafter, target: Target, texts: list[list[int]]
) -> None:
    """A filtered distribution has fewer children than the tree is wide, and none of no mass is
    offered."""
    shape = DynamicTree(nodes=30, depth=2, width=9)
    proposal = propose(drafter, target, texts, (30, 30, 30), (0.7, 0.0, 1.3), shape)
    for row, (text, temperature, paths) in enumerate(
        zip(texts, (0.7, 0.0, 1.3), paths_of(proposal))
    ):
        roots = {path[0] for path in paths if len(path) == 1}
        distribution = process(
            make_distribution(drafter, target, text)(())[None],
            SamplingRows.of([temperature], top_k=[7]),
        )[0]
        if temperature == 0:
            assert len(roots) == 9
        else:
            assert (
                roots <= set(torch.isfinite(distribution).nonzero()[:, 0].tolist())
                and len(roots) == 7
            ), row


def test_sampled_trees_are_drawn_without_replacement_from_the_distribution_they_tell(
    drafter, target: Target, texts: list
) -> None:
    shape, temperatures = SampledTree(branches=(3, 2, 1)), (1.0, 0.0, 1.5)
    proposal = propose(drafter, target, texts, (15, 15, 15), temperatures, shape)
    assert proposal.lengths.tolist() == [15, 15, 15] and proposal.logits is not None
    for row, (text, temperature, paths) in enumerate(zip(texts, temperatures, paths_of(proposal))):
        distribution = make_distribution(drafter, target, text)
        slots = [(), *paths]
        for slot, path in enumerate(slots):
            children = proposal.tokens[row, proposal.parents[row] == slot - 1]
            told = int(proposal.q_rows[row, slot])
            if len(path) == shape.depth:
                assert len(children) == 0 and told == -1
                continue
            assert len(children) == shape.branches[len(path)]
            if temperature == 0:
                assert (
                    told == -1
                    and children.tolist() == distribution(path).topk(len(children)).indices.tolist()
                )
                continue
            processed = process(distribution(path)[None], SamplingRows.of([temperature], top_k=[7]))
            probs = torch.softmax(processed, -1)[0]
            torch.testing.assert_close(
                torch.softmax(proposal.logits[told], -1), probs, atol=1e-6, rtol=1e-5
            )
            # Draws are over the draft's ids.
            if drafter.vocab_map is not None:
                processed = processed[:, drafter.vocab_map]
            position = torch.tensor([len(text) + len(path)])
            drawn = sample_without_replacement(
                processed, torch.tensor([row]), position, Purpose.DRAFT, len(children)
            )
            wanted = drawn[0] if drafter.vocab_map is None else drafter.vocab_map[drawn[0]]
            assert children.tolist() == wanted.tolist()


@pytest.mark.parametrize(
    "greedy", [DynamicTree(nodes=6, depth=3, width=2), DynamicTree(nodes=20, depth=3, width=5)]
)
def test_each_row_gets_the_tree_of_its_distribution(
    drafter, target: Target, texts: list[list[int]], greedy: DynamicTree
) -> None:
    """Whichever of the two is larger, and also when a batch has rows of one kind alone."""
    both = SampledShape(greedy=greedy, sampled=SampledTree(branches=(3, 2)))
    for temperatures in ((1.0, 0.0, 1.5), (0.0, 0.0, 0.0), (1.0, 1.0, 1.0)):
        found = propose(drafter, target, texts, (30, 30, 30), temperatures, both)
        whole = {
            is_drawn: propose(drafter, target, texts, (30, 30, 30), temperatures, shape)
            for is_drawn, shape in ((False, both.greedy), (True, both.sampled))
        }
        for row, temperature in enumerate(temperatures):
            alone = whole[temperature > 0]
            length = int(alone.lengths[row])
            assert int(found.lengths[row]) == length > 0
            assert torch.equal(found.tokens[row, :length], alone.tokens[row, :length])
            assert torch.equal(found.parents[row, :length], alone.parents[row, :length])
            for distribution, wanted in zip(found.q_rows[row].tolist(), alone.q_rows[row].tolist()):
                assert (distribution < 0) == (wanted < 0 or temperature == 0)
                if distribution >= 0:
                    torch.testing.assert_close(found.logits[distribution], alone.logits[wanted])


def test_a_smaller_budget_gives_the_first_nodes_of_the_same_tree(
    drafter, target: Target, texts: list[list[int]]
) -> None:
    shape = SampledTree(branches=(3, 2, 1))
    whole = propose(drafter, target, texts, (15, 15, 15), (1.0, 1.0, 0.0), shape)
    budgets = (7, 1, 12)
    part = propose(drafter, target, texts, budgets, (1.0, 1.0, 0.0), shape)
    assert part.lengths.tolist() == list(budgets)
    for row, budget in enumerate(budgets):
        assert torch.equal(part.tokens[row, :budget], whole.tokens[row, :budget])
        assert torch.equal(part.parents[row, :budget], whole.parents[row, :budget])


def test_siblings_run_out_without_harm(drafter, target: Target, texts: list[list[int]]) -> None:
    """Nine children of a distribution with seven tokens: the last two repeat the first, which
    verification passes over."""
    proposal = propose(
        drafter, target, texts, (9, 9, 9), (1.0, 1.0, 1.0), SampledTree(branches=(9,))
    )
    for row in range(3):
        children = proposal.tokens[row].tolist()
        assert len(set(children[:7])) == 7 and children[7:] == [children[0]] * 2


@pytest.mark.parametrize(
    ("shape", "temperature"), [(DynamicTree(), 1.0), (SampledTree(), 0.0), (SampledTree(), 1.0)]
)
def test_broken_weights_are_told(
    drafter, target: Target, texts: list, shape: TreeShape, temperature: float
) -> None:
    saved = {name: tensor.clone() for name, tensor in drafter.state_dict().items()}
    try:
        for parameter in drafter.parameters():
            parameter.data.fill_(torch.nan)
        proposal = propose(drafter, target, texts, (5, 5, 5), (temperature,) * 3, shape)
    finally:
        drafter.load_state_dict(saved)
    for row in range(3):
        if proposal.logits is not None:
            assert (
                proposal.lengths[row] >= 1 and 0 <= int(proposal.tokens[row, 0]) < target.vocab_size
            )
            assert not torch.isfinite(proposal.logits[proposal.q_rows[row, 0]]).any()
        else:
            assert not proposal.has_mass[row].any()
    assert propose(drafter, target, texts, (5, 5, 5), (temperature,) * 3, shape).has_mass.all()


def test_shapes_are_told_in_words() -> None:
    assert parse_tree("dynamic:nodes=30,depth=6") == DynamicTree(nodes=30, depth=6, width=4)
    assert parse_tree("dynamic") == DynamicTree() and parse_tree("sampled") == SampledTree()
    assert parse_tree("auto") == parse_tree("dynamic+sampled") == SampledShape()
    assert parse_tree("dynamic:nodes=9,depth=2,width=3+sampled:2x1").sampled == SampledTree(
        branches=(2, 1)
    )
    assert (
        parse_tree("sampled:4x2x1") == SampledTree(branches=(4, 2, 1))
        and SampledTree(branches=(4, 2, 1)).nodes == 20
    )
    wrong = (
        "dynamics dynamic:node=3 dynamic:nodes=0 dynamic:nodes=63 dynamic:nodes=5 dynamic+ sampled:0 "
        "sampled:3x sampled:9x9 sampled:999999x999999 sampled+dynamic"
    )
    for text in ("", *wrong.split()):
        with pytest.raises(UserError):
            parse_tree(text)
