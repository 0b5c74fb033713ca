"""Trees of given choices from a Medusa draft: which tokens stand where."""

from __future__ import annotations

from collections.abc import Callable
from itertools import pairwise

import pytest
import torch

from draftsmith.drafters.heads.eagle3 import Eagle3
from draftsmith.drafters.interface import DraftInputs, Proposal
from draftsmith.drafters.options import Eagle3Options, MedusaOptions
from draftsmith.drafters.states.medusa import Medusa
from draftsmith.drafters.target.target import Target
from draftsmith.drafters.tree_shape import FixedTree, parse_tree
from draftsmith.errors import UserError
from draftsmith.kernels.constants import MAX_NODES
from draftsmith.kernels.sampling.filters import SamplingRows
from draftsmith.serve.config import EngineConfig
from draftsmith.serve.engine.build import build_engine
from tests.first_rounds import first_round

TEXTS = [[5, 9, 200, 31, 7], [8, 8, 100], [40]]  # the last has no state to draft from
SHAPE = parse_tree("choices:0,0.0,1,0.1,2,0.0.0,1.0,0.2")


@pytest.fixture(scope="module")
def drafter(target: Target) -> Medusa:
    made = Medusa.create(MedusaOptions(num_heads=4, num_layers=1), target, seed=0)
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for parameter in made.parameters():
            parameter.copy_(torch.randn(parameter.shape, generator=generator))
    return made.eval()


def inputs_of(
    drafter: Medusa, target: Target, ks: list[int], adjust: Callable | None = None
) -> DraftInputs:
    sampling = SamplingRows.of([0.0, 1.0, 0.0])
    return first_round(drafter, target, TEXTS, ks, sampling=sampling, adjust=adjust)


def likeliest(drafter: Medusa, target: Target, row: int) -> list[list[int]]:
    """Tokens of each head, best first."""
    ids = torch.tensor([TEXTS[row]])
    states, _ = target.states(ids, torch.ones_like(ids), drafter.taps)
    state = states[0, -2]
    return [
        (head(state) @ drafter.head_at(depth).T).argsort(descending=True).tolist()
        for depth, head in enumerate(drafter.heads)
    ]


def paths(proposal: Proposal, row: int) -> list[tuple[int, ...]]:
    found: list[tuple[int, ...]] = []
    parents = proposal.parents[row].tolist()
    for node in range(int(proposal.lengths[row])):
        above = found[parents[node]] if parents[node] >= 0 else ()
        found.append((*above, int(proposal.tokens[row, node])))
    return found


@pytest.mark.parametrize("ks", [[60, 60, 60], [8, 3, 8], [1, 0, 5]])
def test_nodes_are_the_likeliest_tokens_of_their_heads(
    ks: list[int], drafter: Medusa, target: Target
) -> None:
    proposal = drafter.propose_tree(inputs_of(drafter, target, ks), SHAPE)
    assert proposal.lengths.tolist() == [min(ks[0], 8), min(ks[1], 8), 0]
    assert proposal.logits is None and bool(proposal.has_mass.all())
    for row in range(2):
        heads = likeliest(drafter, target, row)
        chosen = SHAPE.choices[: min(ks[row], 8)]
        assert set(paths(proposal, row)) == {
            tuple(heads[depth][rank] for depth, rank in enumerate(path)) for path in chosen
        }


def test_choices_deeper_than_the_heads_are_left_out(drafter: Medusa, target: Target) -> None:
    shape = parse_tree("choices:0,0.0,0.0.0,0.0.0.0,0.0.0.0.0,1")
    proposal = drafter.propose_tree(inputs_of(drafter, target, [60] * 3), shape)
    assert proposal.lengths.tolist() == [5, 5, 0]
    assert sorted(map(len, paths(proposal, 0))) == [1, 1, 2, 3, 4]


def test_a_requests_rules_hold_along_each_path(drafter: Medusa, target: Target) -> None:
    """No token may come twice in a row: what follows a node depends on the node."""
    seen: list[list[int]] = []

    def adjust(logits: torch.Tensor, rows: torch.Tensor, prefixes: torch.Tensor) -> torch.Tensor:
        changed = logits.clone()
        for at, padded in enumerate(prefixes.tolist()):
            prefix = [token for token in padded if token >= 0]
            seen.append(prefix)
            changed[at, (prefix or [0])[-1]] = -torch.inf
        return changed

    plain = paths(drafter.propose_tree(inputs_of(drafter, target, [8] * 3), SHAPE), 0)
    proposal = drafter.propose_tree(inputs_of(drafter, target, [8] * 3, adjust), SHAPE)
    found = paths(proposal, 0)
    assert all(one != other for path in found for one, other in pairwise(path))
    assert len(found) == 8 and any(len(prefix) == 2 for prefix in seen) and found[0] == plain[0]


def test_medusas_published_choices() -> None:
    shape = parse_tree("medusa")
    assert isinstance(shape, FixedTree) and (shape.nodes, shape.depth) == (MAX_NODES, 4)
    assert shape.choices[:5] == ((0,), (0, 0), (1,), (0, 1), (2,))
    assert shape == FixedTree(choices=shape.choices), "every choice comes after its beginning"


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("choices:", "tree is 'choices:'"),
        ("choices:0,,1", "tree is"),
        ("choices:0.0,0", r"choice 0\.0 of the tree comes before"),
        ("choices:0,1,0", "choice 0 of the tree is given twice"),
        ("choices:" + ",".join(map(str, range(63))), "63 nodes; give 1 to 62"),
        ("medusa+sampled", "tree is 'medusa"),
    ],
)
def test_shapes_that_are_none(text: str, words: str) -> None:
    with pytest.raises(UserError, match=words):
        parse_tree(text)


def test_a_draft_grows_its_own_shapes_alone(drafter: Medusa, target: Target) -> None:
    head = Eagle3.create(Eagle3Options(), target, seed=1).eval()
    for refused, tree in ((drafter, "dynamic"), (drafter, "auto"), (head, "medusa")):
        with pytest.raises(UserError, match="which grows other shapes"):
            build_engine(target, refused, EngineConfig(tree=tree, compile="off"))
