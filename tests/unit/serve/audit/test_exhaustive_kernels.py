"""Enumeration and whole texts: our kernels hold and every planted mistake is seen."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from draftsmith.kernels.sampling.random_streams import Purpose, sample_without_replacement
from draftsmith.kernels.verify import block as verify_block
from draftsmith.kernels.verify import chain as verify
from draftsmith.kernels.verify import tree as verify_tree
from draftsmith.kernels.verify.draft_tree import DraftTree
from draftsmith.kernels.verify.residual import residual_distribution
from draftsmith.kernels.verify.verdict import Verdict
from draftsmith.serve.sampling.adjustments import Adjustments
from tests.kernel_audit.controls import PENALTIES, PLAIN, PROCEDURES, Case, cases, controls
from tests.kernel_audit.enumerate import Chosen
from tests.kernel_audit.exact import (
    DISTRIBUTIONS,
    EXACT_ERROR,
    TREES,
    Shape,
    block_error,
    chain_error,
    independent_siblings,
    tree_error,
    with_chains_residual,
    without_residual,
)
from tests.kernel_audit.plain_verify import Rules, verify_chain_by, verify_tree_by
from tests.kernel_audit.process import TREE, generate, joint_fit, world_of
from tests.kernel_audit.world import LENGTH, Distribution, World, split_error

CPU = torch.device("cpu")
NUM_ROUNDS = 50_000


def test_a_pipeline_blind_to_drafted_tokens_is_seen_exactly() -> None:
    assert split_error(PENALTIES, 3) < 1e-5

    def blind(
        adjust: Adjustments, raw: torch.Tensor, owners: range, prefixes: list[list[int]]
    ) -> torch.Tensor:
        return adjust.apply(raw, owners, [[] for _ in prefixes])

    assert split_error(PENALTIES, 3, blind) > 0.1


# Generations


@pytest.mark.parametrize("way", PROCEDURES)
def test_generations_use_every_depth_and_do_not_depend_on_the_batch(way: str) -> None:
    made, seeds = world_of(PLAIN, 0.0), torch.arange(240)
    whole = generate(made, PROCEDURES[way], seeds=seeds, length=LENGTH)
    assert 240 * LENGTH / 4 < whole.num_rounds < 240 * LENGTH, (
        "some rounds keep drafts, some do not"
    )
    # Which rounds draft how many, and with which draft, follows from the row; so only a begin of
    # the rows is the same.
    begin = generate(made, PROCEDURES[way], seeds=seeds[:100], length=LENGTH)
    assert torch.equal(begin.cells, whole.cells[:100])


# Filters are applied before verification, which meets holes in p: two of them in the ordinary lane.
SELDOM = (
    "temperature 0.7, top-k 3",
    "top-p 0.8",
    "temperature 1.3, min-p 0.1",
    "draft at temperature 0.5",
)


def case_of(case: Case) -> Any:
    marks = [pytest.mark.long] if case.distribution.name in SELDOM else []
    return pytest.param(case, id=f"{case.way}, {case.distribution.name}", marks=marks)


@pytest.mark.parametrize("case", map(case_of, cases()))
def test_joint_distributions_hold(case: Case) -> None:
    assert joint_fit(case.distribution, case.procedure, NUM_ROUNDS).p_value > 1e-5


# The smallest mistakes need more rounds.
MORE_ROUNDS = {"block, a chain's residual": 300_000, "q reported in bfloat16": 400_000}


def control_of(name: str) -> Any:
    marks = [pytest.mark.long] if name == "q reported in bfloat16" else []
    return pytest.param(name, marks=marks)


@pytest.mark.parametrize("name", map(control_of, controls()))
def test_mistakes_are_caught(name: str) -> None:
    control, num_rounds = controls()[name], MORE_ROUNDS.get(name, NUM_ROUNDS)
    found = joint_fit(control.distribution, control.procedure, num_rounds, offset=control.offset)
    assert found.p_value < 1e-10


# The plain reading of tree verification


def random_tree(
    rows: int, *, repeats: bool
) -> tuple[DraftTree, torch.Tensor, torch.Tensor, torch.Tensor]:
    """Trees of the shape `TREE`, ragged, over 6 tokens, with distributions that have holes."""
    generator = torch.Generator().manual_seed(5)
    parents = torch.tensor(TREE).expand(rows, -1)
    lengths = torch.arange(rows) % (len(TREE) + 1)
    q_logits = torch.randn(rows * 4, 6, generator=generator)
    q_logits[::3, 2] = -torch.inf
    q_rows = torch.full((rows, len(TREE) + 1), -1)
    tokens = torch.zeros(rows, len(TREE), dtype=torch.int64)
    for distribution, slot in enumerate(sorted({parent + 1 for parent in TREE})):
        children = [node for node, parent in enumerate(TREE) if parent + 1 == slot]
        q_rows[:, slot] = torch.arange(rows) * 4 + distribution
        noise = torch.arange(rows) + 1000 * distribution
        drawn = sample_without_replacement(
            q_logits[q_rows[:, slot]], noise, noise, Purpose.DRAFT, len(children)
        )
        tokens[:, children] = drawn
    if repeats:
        tokens[:, 1] = tokens[:, 0]
    p_logits = torch.randn(int((lengths + 1).sum()), 6, generator=generator)
    return DraftTree(tokens, parents, lengths), p_logits, q_logits, q_rows


@pytest.mark.parametrize("repeats", [False, True])
def test_the_plain_reading_decides_as_the_kernel_does(repeats: bool) -> None:
    tree, p_logits, q_logits, q_rows = random_tree(800, repeats=repeats)
    seeds, positions = torch.arange(800), torch.arange(800) * 7
    kernel = verify_tree.verify_tree(p_logits, tree, q_logits, q_rows, seeds, positions)
    plain = verify_tree_by(Rules(), p_logits, tree, q_logits, q_rows, seeds, positions)
    assert kernel.accepted.unique().tolist() == [0, 1, 2, 3]
    for ours, theirs in zip(plain, kernel, strict=True):
        assert torch.equal(ours, theirs)


def test_the_plain_reading_of_a_chain_decides_as_the_kernel_does() -> None:
    generator = torch.Generator().manual_seed(6)
    lengths, seeds = torch.arange(600) % 4, torch.arange(600)
    drafts = torch.randint(0, 6, (600, 3), generator=generator)
    p_logits, q_logits = (
        torch.randn(int((lengths + 1).sum()), 6, generator=generator),
        torch.randn(600, 3, 6, generator=generator),
    )
    kernel = verify.verify_chain(p_logits, drafts, lengths, q_logits, seeds, seeds)
    plain = verify_chain_by(Rules(), p_logits, drafts, lengths, q_logits, seeds, seeds)
    assert torch.equal(plain.accepted, kernel.accepted) and torch.equal(plain.tokens, kernel.tokens)


# Enumeration


@pytest.mark.parametrize("distribution", DISTRIBUTIONS, ids=lambda distribution: distribution.name)
def test_every_outcome_of_a_round_has_its_probability(distribution: Distribution) -> None:
    assert chain_error(distribution, 3) < EXACT_ERROR
    if not distribution.deterministic:
        assert block_error(distribution, 3) < EXACT_ERROR


@pytest.mark.parametrize("distribution", DISTRIBUTIONS, ids=lambda distribution: distribution.name)
@pytest.mark.parametrize("shape", TREES.values(), ids=TREES)
@pytest.mark.long
def test_every_outcome_of_a_tree_has_its_probability(
    distribution: Distribution, shape: Shape
) -> None:
    assert tree_error(distribution, 3, shape) < EXACT_ERROR


def test_wrong_decisions_have_other_probabilities() -> None:
    siblings = Shape((-1, -1), depth=1, siblings=2, vocab_size=4)
    assert chain_error(DISTRIBUTIONS[0], 3, verify=without_residual) > EXACT_ERROR
    assert block_error(DISTRIBUTIONS[0], 3, verify=with_chains_residual) > EXACT_ERROR
    assert tree_error(DISTRIBUTIONS[0], 3, siblings, verify=independent_siblings) > EXACT_ERROR


@pytest.mark.parametrize("distribution", DISTRIBUTIONS, ids=lambda distribution: distribution.name)
def test_enumeration_calls_the_kernels_as_they_ship(
    distribution: Distribution, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A residual that is wrong by a little, in the kernels' own modules, is seen in every way to
    verify."""

    def warmed(log_p: torch.Tensor, log_q: torch.Tensor) -> torch.Tensor:
        return residual_distribution(log_p, log_q) * 0.9

    for module in (verify, verify_block, verify_tree):
        monkeypatch.setattr(module, "residual_distribution", warmed)
    assert chain_error(distribution, 3) > 1e-6
    if not distribution.deterministic:
        assert block_error(distribution, 3) > 1e-6
    # Deterministic children have no such residual, and two children exhaust a draft of two tokens.
    if not distribution.deterministic and not distribution.top_k:
        assert tree_error(distribution, 3, TREES["tree, three levels"]) > 1e-6


def test_a_test_that_is_no_threshold_is_seen() -> None:
    """A chain that keeps its drafts by two intervals of the uniform, of the right total length, has
    no border to be found."""

    def folded(*arguments: torch.Tensor, draws: Chosen) -> Verdict:
        unfolded = Chosen((draws.uniforms + 0.5) % 1)
        verdict = verify.verify_chain_torch(*arguments, draws=unfolded)
        draws.probs = unfolded.probs
        return verdict

    assert chain_error(DISTRIBUTIONS[0], 3, verify=folded) > 1e-3


def test_a_draft_that_is_the_target_leaves_no_residual(monkeypatch: pytest.MonkeyPatch) -> None:
    def twins(shape: Shape, distribution: Distribution, seed: int) -> World:
        made = distribution.world(vocab_size=shape.vocab_size, seed=seed, device=CPU)
        return World(made.p_logits, made.p_logits[:1])

    monkeypatch.setattr(Shape, "world", twins)
    assert max(chain_error(PLAIN, 4), block_error(PLAIN, 4), tree_error(PLAIN, 4)) < 1e-12
