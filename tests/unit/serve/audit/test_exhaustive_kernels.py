"""Enumeration: our kernels hold and every planted mistake is seen."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from draftsmith.kernels.verify import block as verify_block
from draftsmith.kernels.verify import chain as verify
from draftsmith.kernels.verify import tree as verify_tree
from draftsmith.kernels.verify.residual import residual_distribution
from draftsmith.kernels.verify.verdict import Verdict
from tests.kernel_audit.enumerate import Chosen
from tests.kernel_audit.exact import (
    DISTRIBUTIONS,
    EXACT_ERROR,
    TREES,
    Shape,
    block_error,
    chain_error,
    tree_error,
    with_chains_residual,
    with_warmer_q,
    without_residual,
)
from tests.kernel_audit.world import Distribution, World


@pytest.mark.parametrize("distribution", DISTRIBUTIONS, ids=lambda distribution: distribution.name)
def test_every_outcome_of_a_round_has_its_probability(distribution: Distribution) -> None:
    assert chain_error(distribution, 3) < EXACT_ERROR
    if not distribution.deterministic:
        assert block_error(distribution, 3) < EXACT_ERROR


def shape_of(name: str) -> Any:
    marks = [] if name == "tree, three levels" else [pytest.mark.long]
    return pytest.param(TREES[name], id=name, marks=marks)


@pytest.mark.parametrize("distribution", DISTRIBUTIONS, ids=lambda distribution: distribution.name)
@pytest.mark.parametrize("shape", map(shape_of, TREES))
def test_every_outcome_of_a_tree_has_its_probability(
    distribution: Distribution, shape: Shape
) -> None:
    assert tree_error(distribution, 3, shape) < EXACT_ERROR


def test_wrong_decisions_have_other_probabilities() -> None:
    siblings = Shape((-1, -1), depth=1, siblings=2, vocab_size=4)
    assert chain_error(DISTRIBUTIONS[0], 3, verify=without_residual) > EXACT_ERROR
    assert block_error(DISTRIBUTIONS[0], 3, verify=with_chains_residual) > EXACT_ERROR
    assert tree_error(DISTRIBUTIONS[0], 3, siblings, verify=with_warmer_q) > EXACT_ERROR


@pytest.mark.parametrize("deterministic", [False, True])
def test_enumeration_calls_the_kernels_as_they_ship(
    deterministic: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A residual that is wrong by a little, in the kernels' own modules, is seen in every way to
    verify."""

    def warmed(log_p: torch.Tensor, log_q: torch.Tensor) -> torch.Tensor:
        return residual_distribution(log_p, log_q) * 0.9

    for module in (verify, verify_block, verify_tree):
        monkeypatch.setattr(module, "residual_distribution", warmed)
    distribution = next(one for one in DISTRIBUTIONS if one.deterministic == deterministic)
    assert chain_error(distribution, 3) > 1e-6
    if not deterministic:  # whose children have no such residual
        assert block_error(distribution, 3) > 1e-6
        assert tree_error(distribution, 3, TREES["tree, three levels"]) > 1e-6


def test_a_test_that_is_no_threshold_is_seen() -> None:
    """A chain that keeps its drafts by two intervals of the uniform, of the right total length, has
    no border to be found."""

    def folded(*arguments: torch.Tensor, draws: Chosen) -> Verdict:
        unfolded = Chosen((draws.uniforms + 0.5) % 1)
        verdict = verify.verify_chain(*arguments, draws=unfolded)
        draws.probs = unfolded.probs
        return verdict

    assert chain_error(DISTRIBUTIONS[0], 3, verify=folded) > 1e-3


def test_a_draft_that_is_the_target_leaves_no_residual(monkeypatch: pytest.MonkeyPatch) -> None:
    def twins(shape: Shape, distribution: Distribution, seed: int) -> World:
        made = distribution.world(shape.vocab_size, seed)
        return World(made.p_logits, made.p_logits)

    monkeypatch.setattr(Shape, "world", twins)
    assert (
        max(error(DISTRIBUTIONS[0], 4) for error in (chain_error, block_error, tree_error)) < 1e-12
    )
