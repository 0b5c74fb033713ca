"""Verdicts on runs of scripts/bench_fleet: nothing of what must hold goes unnoticed."""

from __future__ import annotations

from typing import Any

import pytest

from scripts.bench.fleet.kills import PLANTED
from scripts.bench.fleet.verdict import of_loop, of_storm

KILL = {"what": "core", "engine": "a", "has_hit": True, "back_after_s": 3.0}
STORM: dict[str, Any] = {
    "planned": 2, "kills": [KILL, KILL], "writers_ended": True, "answers": 9, "recorded": 8,
    "lost_where_admitted": 1, "changed": [], "lost_elsewhere": [], "failed_elsewhere": [],
    "oldest_lost_s": 1.0, "unflushed_s": 3.0, "greedy": 4, "greedy_equal": 4,
    "served_after": {"a": 1, "b": 2}, "z": {"accepted": 2.9}, "violations": 0, "unverified": [],
    "reported": [1, 2], "refused": {"a": [PLANTED], "b": []}, "converged_s": 2.0,
    "digests": {"a": "x", "b": "x"},
}  # fmt: skip
LOOP: dict[str, Any] = {
    "requests": 9, "failed": 0, "equal_texts": 9, "z": {"accepted": -2.9}, "violations": 0,
    "engines": [{"version": 4}, {"version": 4}], "live": 4, "versions": [1, 2, 3, 4],
    "prose": {"1": {"alpha": 0.3}, "4": {"alpha": 0.2}}, "last_quarter": {"alpha": 0.4},
    "own": {"failed": 0, "prose": {"1": {"alpha": 0.3}}, "last_quarter": {"alpha": 0.49}},
}  # fmt: skip


def test_a_run_in_which_all_held_has_no_sentence() -> None:
    assert list(of_storm(STORM)) == list(of_loop(LOOP)) == []


@pytest.mark.parametrize(
    "changed",
    [
        {"planned": 3}, {"planned": 0, "kills": []}, {"kills": [KILL, {**KILL, "has_hit": False}]},
        {"kills": [KILL, {**KILL, "back_after_s": None}]}, {"writers_ended": False},
        {"answers": 0, "recorded": 0, "lost_where_admitted": 0}, {"answers": 10},
        {"changed": ["id"]}, {"lost_elsewhere": ["id"]}, {"failed_elsewhere": [["a", 1.0, 2.0]]},
        {"oldest_lost_s": 3.1}, {"greedy": 0, "greedy_equal": 0}, {"greedy_equal": 3},
        {"served_after": {"a": 1, "b": 0}}, {"z": {"accepted": -3.1}}, {"z": {}},
        {"z": {"accepted": float("nan")}}, {"violations": 1}, {"unverified": [PLANTED]},
        {"reported": [1]}, {"refused": {"a": [], "b": [2]}}, {"converged_s": None},
        {"digests": {"a": "x", "b": "y"}}, {"digests": {"a": "", "b": ""}}, {"digests": {}},
    ],
)  # fmt: skip
def test_a_storm_with_one_thing_wrong_has_one_sentence(changed: dict[str, Any]) -> None:
    assert len(list(of_storm(STORM | changed))) == 1


@pytest.mark.parametrize(
    "changed",
    [
        {"failed": 1}, {"equal_texts": 8}, {"z": {"accepted": 3.1}}, {"violations": 2},
        {"engines": [{"version": 4}, {"version": 3}]}, {"engines": []},
        {"last_quarter": {"alpha": 0.3}, "own": None}, {"requests": 0, "equal_texts": 0},
        {"own": LOOP["own"] | {"failed": 1}}, {"last_quarter": {"alpha": 0.39}},
    ],
)  # fmt: skip
def test_a_loop_with_one_thing_wrong_has_one_sentence(changed: dict[str, Any]) -> None:
    assert len(list(of_loop(LOOP | changed))) == 1
