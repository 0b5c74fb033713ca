"""docs/families.md says of every family what its drafts do."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from draftsmith.drafters.interface import check_grows
from draftsmith.drafters.options import OPTIONS
from draftsmith.drafters.registry import FAMILIES
from draftsmith.drafters.target.target import Target
from draftsmith.drafters.tree_shape import parse_tree
from draftsmith.errors import UserError
from draftsmith.serve.config import EngineConfig
from draftsmith.serve.engine.build import build_engine
from tests.families import PAGE, ends_chains, page, trees_of


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
