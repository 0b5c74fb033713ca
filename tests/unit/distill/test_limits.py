"""Options that no run could use are refused before anything is read, in one sentence that names
them."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import pytest

from draftsmith.config import Limits, build
from draftsmith.distill.command import run
from draftsmith.distill.config import DistillConfig
from draftsmith.errors import UserError

REQUIRED = dict.fromkeys(("target", "draft", "buffer", "versions"), "/no/where")


def test_ends_belong_to_an_interval_as_they_are_written() -> None:
    half_open, other = Limits(0, 1), Limits(0, math.inf, "(]")
    held = [half_open.hold(value) for value in (-1, 0, 0.5, 1, math.nan)]
    assert held == [False, True, True, False, False]
    held = [other.hold(value) for value in (0, 1e-9, math.inf, math.nan)]
    assert held == [False, True, True, False]
    assert (str(half_open), str(other)) == ("at least 0 and below 1", "above 0")


@pytest.mark.parametrize(
    ("values", "says"),
    [
        (
            {"learn": {"positions": ["rejected"]}},
            "option 'learn.positions' is ['rejected']; it must be one of accepted, first-rejected",
        ),
        (
            {"learn": {"reservoir": 4}},
            "learn.reservoir is 4, below learn.fresh 8; no update could ever begin",
        ),
        ({"gate": {"requests": 50, "window": 10}}, "gate.window is 10, below gate.requests 50"),
    ],
)
def test_what_does_not_go_together_is_one_sentence(values: Mapping[str, Any], says: str) -> None:
    with pytest.raises(UserError) as error:
        run(build(DistillConfig, {**REQUIRED, **values}))
    assert str(error.value).startswith(says) and "\n" not in str(error.value)
