"""Numbers that no run could use are refused before anything is read, in one sentence that names
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

REQUIRED = {
    "target": "no/target",
    "draft": "no/draft",
    "buffer": "/no/buffer",
    "versions": "/no/versions",
}


def test_ends_belong_to_an_interval_as_they_are_written() -> None:
    half_open, other = Limits(0, 1), Limits(0, math.inf, "(]")
    assert [half_open.hold(value) for value in (-1, 0, 0.5, 1, math.nan)] == [
        False,
        True,
        True,
        False,
        False,
    ]
    assert [other.hold(value) for value in (0, 1e-9, math.inf, math.nan)] == [
        False,
        True,
        True,
        False,
    ]
    assert (str(half_open), str(other)) == ("at least 0 and below 1", "above 0")


@pytest.mark.parametrize(
    ("values", "says"),
    [
        ({"retention": {"bytes": 0}}, "option 'retention.bytes' is 0; it must be at least 1048576"),
        (
            {"gate": {"gain": math.nan}},
            "option 'gate.gain' is nan; it must be at least 0 and below 1",
        ),
        ({"gate": {"drop": -0.1}}, "option 'gate.drop' is -0.1"),
        (
            {"gate": {"floor": 1.5}},
            "option 'gate.floor' is 1.5; it must be at least 0 and at most 1",
        ),
        ({"drift": {"false_alarms": 0}}, "option 'drift.false_alarms' is 0.0; it must be above 0"),
        ({"learn": {"lr": math.inf}}, "option 'learn.lr' is inf; it must be above 0 and finite"),
        (
            {"learn": {"unroll": {"steps": 0}}},
            "option 'learn.unroll.steps' is 0; it must be at least 1",
        ),
        ({"learn": {"unroll": {"decay": 1.5}}}, "option 'learn.unroll.decay' is 1.5"),
        (
            {"learn": {"positions": ["rejected"]}},
            "option 'learn.positions' is ['rejected']; it must be one of accepted, first-rejected",
        ),
        ({"poll_s": math.nan}, "option 'poll_s' is nan"),
        ({"threads": 0}, "option 'threads' is 0"),
        (
            {"learn": {"reservoir": 4}},
            "learn.reservoir is 4, below learn.fresh 8; no update could ever begin",
        ),
        ({"gate": {"requests": 50, "window": 10}}, "gate.window is 10, below gate.requests 50"),
    ],
)
def test_bad_numbers_are_one_sentence(values: Mapping[str, Any], says: str) -> None:
    with pytest.raises(UserError) as error:
        run(build(DistillConfig, {**REQUIRED, **values}))
    assert str(error.value).startswith(says) and "\n" not in str(error.value)
