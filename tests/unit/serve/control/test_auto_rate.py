"""`--k auto` on a made-up server, learning included."""

from __future__ import annotations

import pytest

from draftsmith.serve.control.auto import AutoControl
from tests.simulated_server import Constant, run, scenarios


@pytest.mark.parametrize(
    ("name", "best_k", "least"),
    [
        ("small target, bad draft, 1", 0, 0.98),
        ("small target, bad draft, 8", 0, 0.97),
        ("padded target, 1", 4, 0.97),
        ("padded target, 8", 1, 0.97),
        ("two classes, padded, 8", 1, 1.03),  # no single k does as well
    ],
)
def test_k_auto_reaches_the_best_fixed_k(name: str, best_k: int, least: float) -> None:
    scenario = scenarios()[name]
    assert run(scenario, AutoControl(), 0) >= least * run(scenario, Constant(best_k), 0)


def test_a_run_repeats() -> None:
    scenario = scenarios()["first second, small, 8"]
    assert run(scenario, AutoControl(), 3) == run(scenario, AutoControl(), 3)
