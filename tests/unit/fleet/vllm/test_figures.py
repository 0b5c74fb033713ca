"""Figures of several recorders are those of one engine, and its floor."""

from __future__ import annotations

from typing import Any

import pytest

from draftsmith.fleet.vllm.follower import below_floor, figures_of, tokens_of


def worker(replica: int, tokens: int, **versions: dict[str, float]) -> dict[str, Any]:
    writer = {"versions": {name[1:]: one for name, one in versions.items()}}
    return {"replica": replica, "records": {"tokens": tokens, "writer": writer}}


ONE = {
    "rounds": 10, "positions": 20, "accepted": 5, "committed": 15, "judged": 20, "alpha": 0.25,
    "tau": 1.5, "z": 0.5, "log10_evidence": -1.0, "alarm": 0.0,
}  # fmt: skip
OTHER = {
    "rounds": 30, "positions": 60, "accepted": 45, "committed": 74, "judged": 50, "alpha": 0.75,
    "tau": 74 / 30, "z": -4.0, "log10_evidence": 3.5, "alarm": 1.0,
}  # fmt: skip


def test_counts_are_added_and_the_worst_losslessness_stays() -> None:
    found = figures_of([worker(0, 9, v7=ONE), worker(1, 9, v7=OTHER, v8=ONE), {"records": None}])
    assert found["8"] == ONE
    assert found["7"] == {
        "rounds": 40, "positions": 80, "accepted": 50, "committed": 89, "judged": 70,
        "alpha": 50 / 80, "tau": pytest.approx(89 / 40), "z": -4.0, "log10_evidence": 3.5, "alarm": 1.0,
    }  # fmt: skip


def test_ranks_of_a_replica_sample_the_same_tokens() -> None:
    assert tokens_of([worker(0, 100), worker(0, 0), worker(1, 40), {"state": "refused"}]) == 140


def test_the_floor_waits_for_rounds_and_an_alarm_does_not() -> None:
    def reason(alpha: float, rounds: int = 64, **more: float) -> str:
        served = {"rounds": rounds, "alpha": alpha, **more}
        return below_floor(served, {"rounds": 64, "alpha": 0.4}, drop=0.1, rounds=64)

    assert reason(0.4) == reason(0.31) == reason(0.29, rounds=63) == ""
    assert reason(0.29).startswith("alpha 0.290 in 64 rounds")
    assert below_floor({"rounds": 64, "alpha": 0.29}, {}, drop=0.1, rounds=64) == ""
    assert "monitor alarms" in reason(0.4, rounds=1, alarm=1.0)
