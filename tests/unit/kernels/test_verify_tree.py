"""Tree verification: exact laws by enumeration, joint laws by G-tests, edge cases; on the reference and on the Triton kernels."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from draftsmith.kernels.randomness import Purpose, sample, sample_without_replacement
from draftsmith.kernels.statistics import g_test
from draftsmith.kernels.trees import DraftTree, chain_tree
from draftsmith.kernels.verify import one_hot_logits, verify_chain, verify_chain_torch
from draftsmith.kernels.verify_tree import TreeVerdict, sibling_law, verify_tree, verify_tree_torch

Verify = Callable[..., TreeVerdict]
FALSE_ALARM = 1e-6  # seeds are fixed, so that a test passes or fails for good


def triton_small_blocks(*arguments: object) -> TreeVerdict:
    """Blocks of 16 tokens, so that small vocabularies have several."""
    from draftsmith.kernels.verify_tree_triton import verify_tree_triton

    return verify_tree_triton(*arguments, block=16)


@pytest.fixture(params=["torch", "triton"])
def verify(request: pytest.FixtureRequest, device: torch.device, poisoned_empty: None) -> Verify:
    chosen = verify_tree_torch if request.param == "torch" else triton_small_blocks

    def on_device(p: torch.Tensor, tree: DraftTree, *others: torch.Tensor | None) -> TreeVerdict:
        moved = (None if tensor is None else tensor.to(device) for tensor in others)
        verdict = chosen(p.to(device), DraftTree(*(tensor.to(device) for tensor in tree)), *moved)
        return TreeVerdict(*(tensor.cpu() for tensor in verdict))

    return on_device


def ids(*values: object) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.int64)


def normal(seed: int, *shape: int, scale: float = 1.0) -> torch.Tensor:
    return scale * torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def peaked(tokens: list[int], size: int = 20) -> torch.Tensor:
    return one_hot_logits(torch.tensor(tokens), torch.zeros(len(tokens), size))


# Exact laws


def ordered_draws(q: torch.Tensor, count: int) -> dict[tuple[int, ...], float]:
    """The chance of every ordered draw of `count` tokens without replacement from q [V]."""
    chances = {}
    for tokens in itertools.permutations(range(len(q)), count):
        chance, rest = 1.0, q.clone()
        for token in tokens:
            chance *= float(rest[token] / rest.sum())
            rest[token] = 0
        chances[tokens] = chance
    return chances


def emitted_law(p: torch.Tensor, q: torch.Tensor, count: int, repeats: tuple[int, ...] = ()) -> torch.Tensor:
    """The law [V] of the token that follows a node with `count` children; `repeats` are places shown once more at the end."""
    law = torch.zeros_like(p)
    for tokens, chance in ordered_draws(q, count).items():
        shown = torch.tensor([*tokens, *(tokens[place] for place in repeats)])
        node = sibling_law(p.log(), q.log(), shown)
        for token, keep in zip(shown.tolist(), node.keep.tolist()):
            law[token] += chance * keep
            chance *= 1 - keep
        law += chance * node.left.exp()
    return law


@pytest.mark.parametrize("count", [1, 2, 3, 4])
@pytest.mark.parametrize("repeats", [(), (0,), (1, 0)])
def test_true_q_siblings_leave_the_target_law(count: int, repeats: tuple[int, ...]) -> None:
    if count == 1 and repeats == (1, 0):
        repeats = (0, 0)
    p, q = (normal(seed, 5, scale=1.5).double().softmax(-1) for seed in (1, 2))
    assert (emitted_law(p, q, count, repeats) - p).abs().max() < 1e-12
    p = torch.tensor([0.5, 0.5, 0.0, 0.0, 0.0], dtype=torch.float64)
    assert (emitted_law(p, q, count, repeats) - p).abs().max() < 1e-12


def test_a_residual_that_forgets_to_renormalise_q_is_seen() -> None:
    """The negative control of the enumeration."""
    p, q = torch.tensor([0.45, 0.45, 0.05, 0.05]).double(), torch.tensor([0.3, 0.1, 0.3, 0.3]).double()
    law = torch.zeros_like(p)
    for tokens, chance in ordered_draws(q, 2).items():
        first = sibling_law(p.log(), q.log(), ids(tokens[0]))
        second = sibling_law(first.left, q.log(), ids(tokens[1]))  # q still has the first one
        for token, keep in zip(tokens, (first.keep[0], second.keep[0])):
            law[token] += chance * keep
            chance *= 1 - float(keep)
        law += chance * second.left.exp()
    assert (law - p).abs().max() > 1e-3


@pytest.mark.parametrize("tokens", [[2], [0, 3], [1, 1, 4], [4, 3, 2, 1, 0], [-1, 2, -1, 2]])
def test_deterministic_siblings_leave_the_target_law(tokens: list[int]) -> None:
    p = normal(3, 5).double().softmax(-1)
    node = sibling_law(p.log(), None, torch.tensor(tokens))
    law, reach = torch.zeros_like(p), 1.0
    for token, keep in zip(tokens, node.keep.tolist()):
        assert keep == 0 or token >= 0
        law[max(token, 0)] += reach * keep
        reach *= 1 - keep
    assert (law + reach * node.left.exp() - p).abs().max() < 1e-12


def test_more_siblings_are_kept_more_often() -> None:
    p, q = (normal(seed, 5, scale=1.5).double().softmax(-1) for seed in (1, 2))
    kept = []
    for count in range(1, 5):
        lost = 0.0
        for tokens, chance in ordered_draws(q, count).items():
            lost += chance * float((1 - sibling_law(p.log(), q.log(), torch.tensor(tokens)).keep).prod())
        kept.append(1 - lost)
    assert kept == sorted(kept) and kept[0] == pytest.approx(torch.minimum(p, q).sum().item()) and kept[3] > kept[0] + 0.1


# Joint laws


def drawn_trees(p: torch.Tensor, q: torch.Tensor, width: int, rows: int, seed: int = 0) -> tuple[object, ...]:
    """Two levels of `width` children everywhere over a Markov pair p, q [V + 1, V] (the last row is the start)."""
    size = q.shape[1]
    seeds, positions = torch.arange(rows) + seed, torch.full((rows,), 7)
    start = torch.full((rows,), size)
    first = sample_without_replacement(q[start], seeds, positions, Purpose.DRAFT, width)
    second = [sample_without_replacement(q[first[:, i]], seeds, positions + 1, Purpose.DRAFT, width) for i in range(width)]
    tokens = torch.cat([first, *second], dim=1)
    parents = torch.tensor([-1] * width + [i for i in range(width) for _ in range(width)]).expand(rows, -1)
    states = torch.cat([start[:, None], tokens], dim=1)
    tree = DraftTree(tokens, parents, torch.full((rows,), tokens.shape[1]))
    q_rows = torch.where(torch.arange(states.shape[1]) <= width, states, -1)
    return p[states.flatten()], tree, q, q_rows, seeds, positions


def pair_counts(tokens: torch.Tensor, p: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Counts of the first two tokens over the target's joint law; where one was emitted, the target adds the second."""
    size = p.shape[1]
    seeds = torch.arange(len(tokens)) + 10**6
    added = sample(p[tokens[:, 0]], seeds, torch.zeros_like(seeds), Purpose.BONUS)
    second = torch.where(tokens[:, 1] < 0, added, tokens[:, 1])
    joint = p[size].softmax(-1)[:, None] * p[:size].softmax(-1)
    return torch.bincount(tokens[:, 0] * size + second, minlength=size * size), joint.flatten()


@pytest.mark.parametrize("width", [1, 3])
def test_a_tree_with_true_q_leaves_the_joint_law(width: int) -> None:
    p, q = normal(4, 7, 6, scale=1.5), normal(5, 7, 6, scale=1.5)
    arguments = drawn_trees(p, q, width, 40_000)
    verdict = verify_tree(*arguments)
    assert g_test(*pair_counts(verdict.tokens, p)).p_value > FALSE_ALARM
    assert 0.1 < (verdict.accepted == 2).float().mean() < 0.9
    told_wrong = verify_tree(*arguments[:2], q / 1.5, *arguments[3:])
    assert g_test(*pair_counts(told_wrong.tokens, p)).p_value < FALSE_ALARM, "a draft law that is not the drawn one is seen"


def test_siblings_told_as_without_replacement_in_the_wrong_order_are_seen() -> None:
    """The order of the tests is the order of the draws; sorting siblings by probability afterwards biases."""
    p, q = normal(4, 7, 6, scale=1.5), normal(5, 7, 6, scale=1.5)
    p_logits, tree, *others = drawn_trees(p, q, 3, 40_000)
    likely_last = q[6][tree.tokens[:, :3]].argsort(dim=1)
    order = torch.cat([likely_last, torch.arange(3, 12).expand(len(likely_last), 9)], dim=1)
    tokens = tree.tokens.gather(1, order)
    parents = torch.cat([tree.parents[:, :3], likely_last.argsort(dim=1).repeat_interleave(3, dim=1)], dim=1)
    slots = torch.cat([torch.zeros(len(order), 1, dtype=torch.int64), order + 1], dim=1)
    p_logits = p_logits.view(len(order), 13, -1).gather(1, slots[..., None].expand(-1, -1, 6)).flatten(0, 1)
    others[1] = others[1].gather(1, slots)
    verdict = verify_tree(p_logits, DraftTree(tokens, parents, tree.lengths), *others)
    assert g_test(*pair_counts(verdict.tokens, p)).p_value < FALSE_ALARM


def test_a_deterministic_tree_leaves_the_joint_law() -> None:
    p, rows = normal(6, 7, 6, scale=1.5), 40_000
    tree = DraftTree(*(t.expand(rows, *t.shape) for t in (ids(2, 0, 5, 1, 1, 3), ids(-1, -1, 0, 0, 0, 1), torch.tensor(6))))
    states = torch.cat([torch.full((rows, 1), 6), tree.tokens], dim=1)
    arguments = torch.arange(rows), torch.full((rows,), 3)
    verdict = verify_tree(p[states.flatten()], tree, None, None, *arguments)
    assert g_test(*pair_counts(verdict.tokens, p)).p_value > FALSE_ALARM
    shifted = verify_tree(p[states.flatten()].roll(1, 0), tree, None, None, *arguments)
    assert g_test(*pair_counts(shifted.tokens, p)).p_value < FALSE_ALARM
