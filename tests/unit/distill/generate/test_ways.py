"""Temperature and thinking of each answer."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from typing import Any

import pytest

from draftsmith.distill.config import GenerateOptions
from draftsmith.distill.config_checks import check_generate as check
from draftsmith.distill.generate.prompts import way_of
from draftsmith.errors import UserError


def config(**changes: Any) -> GenerateOptions:
    return GenerateOptions(target="t", prompts="p", out="o", **changes)


def test_ways_are_spread_evenly_and_follow_no_pattern_of_the_prompts():
    several = config(temperature=(0.0, 0.7, 1.0), thinking="both")
    ways = [way_of(several, number) for number in range(600)]
    assert ways == [way_of(several, number) for number in range(600)]
    assert set(Counter(ways).values()) == {100}
    assert set(Counter(ways[:6]).values()) == {1}
    # Of every sixth prompt, each way has 17 in the mean; 40 once in 10 million.
    assert max(Counter(ways[::6]).values()) < 40
    assert ways != [way_of(replace(several, seed=1), number) for number in range(600)]


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"temperature": (0.0, -1.0)}, "'temperature' is -1.0"),
        ({"temperature": (0.0, 1.0), "keep_answers": True}, "--keep-answers writes none"),
        ({"thinking": "both", "keep_answers": True}, "--keep-answers writes none"),
    ],
)
def test_ways_that_cannot_be_are_refused(changes, said):
    with pytest.raises(UserError, match=said):
        check(config(**changes))
