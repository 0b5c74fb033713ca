"""What drafting reads of weights, family by family: chains all of it a token, blocks once a
proposal."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from draftsmith.drafters.interface import check_grows
from draftsmith.drafters.options import OPTIONS, DraftLmOptions, DsparkOptions, MedusaOptions
from draftsmith.drafters.registry import FAMILIES
from draftsmith.drafters.states.medusa import Medusa
from draftsmith.drafters.states.mlp import Mlp
from draftsmith.drafters.target.target import Target
from draftsmith.drafters.tree_shape import parse_tree
from draftsmith.drafters.weights import ReadBytes
from draftsmith.errors import UserError
from draftsmith.serve.config import EngineConfig
from draftsmith.serve.engine.build import build_engine
from tests.families import PAGE, ends_chains, page, trees_of

FLOAT = 4
SIZES = {
    "dspark": DsparkOptions(markov_rank=6),
    "draft-lm": DraftLmOptions(num_layers=1, hidden_size=24, num_attention_heads=2),
}


def reads(family: str, target: Target) -> tuple[ReadBytes, int]:
    """What the draft tells, and all that there is to read: its own weights but embeddings, and the
    head."""
    draft = FAMILIES[family].create(SIZES.get(family) or OPTIONS[family](), target, seed=0)
    names = {
        name
        for name, _ in draft.named_parameters()
        if "embed_tokens" not in name and "markov_w1" not in name
    }
    own = sum(weight.numel() for name, weight in draft.named_parameters() if name in names)
    # A head of its own, the draft LM's tied to its embedding, the target's.
    width = {"eagle3": 0, "p-eagle": 0, "draft-lm": 24}.get(family, target.hidden_size)
    return draft.read_bytes(), FLOAT * (own + width * target.vocab_size)


@pytest.mark.parametrize("family", ["eagle3", "eagle1", "mtp", "draft-lm"])
def test_a_chain_reads_all_of_it_for_every_token(family: str, target: Target) -> None:
    told, whole = reads(family, target)
    assert told == (0, whole)


@pytest.mark.parametrize("family", ["p-eagle", "dflash"])
def test_a_block_is_read_once_however_long(family: str, target: Target) -> None:
    told, whole = reads(family, target)
    assert told == (whole, 0)


def test_transitions_are_read_for_every_token_of_a_block(target: Target) -> None:
    told, whole = reads("dspark", target)
    assert told.token == FLOAT * 6 * target.vocab_size and told.proposal + told.token == whole


def test_heads_and_recurrent_steps_read_what_is_theirs(target: Target) -> None:
    size, table = target.hidden_size, target.hidden_size * target.vocab_size
    shared = Medusa.create(MedusaOptions(num_heads=3, num_layers=2), target, seed=0).read_bytes()
    assert shared == (FLOAT * table, FLOAT * 2 * (size * size + size))
    apart = Medusa(target, num_heads=3, num_layers=2, own_tables=True).read_bytes()
    assert apart == (0, shared.token + FLOAT * table)
    step = FLOAT * (size * size + 2 * size + table)
    for tied in (True, False):
        assert Mlp(target, inner_size=size, num_predict=3, tied=tied).read_bytes() == (0, step)


# docs/families.md


def test_the_page_is_that_of_the_code() -> None:
    assert PAGE.read_text() == page()


@pytest.mark.parametrize("family", FAMILIES)
def test_a_draft_does_what_the_page_says_and_no_more(
    family: str, tiny_target: Callable[..., str]
) -> None:
    target = Target.load(tiny_target("llama"))
    drafter = FAMILIES[family].create(OPTIONS[family](), target, seed=0).eval()
    for name, shape in (("grown", "sampled:2x1"), ("choices", "choices:0,0.0")):
        if name in trees_of(family):
            check_grows(drafter, parse_tree(shape))
        else:
            with pytest.raises(UserError, match="tree is given with a"):
                check_grows(drafter, parse_tree(shape))
    config = EngineConfig(k=2, compile="off", least_confidence=0.5)
    if ends_chains(family) == "yes":
        build_engine(target, drafter, config)
    else:
        with pytest.raises(UserError, match="least_confidence"):
            build_engine(target, drafter, config)
