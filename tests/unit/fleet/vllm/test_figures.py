"""Figures of several recorders are those of one engine, and its floor."""

from __future__ import annotations

from typing import Any

import pytest

from draftsmith.fleet.vllm.follower import ServedVersions, below_floor, figures_of, tokens_of


def worker(replica: int, tokens: int, **versions: dict[str, float]) -> dict[str, Any]:
    writer = {"versions": {name[1:]: one for name, one in versions.items()}}
    return {"replica": replica, "records": {"tokens": tokens, "writer": writer}}


ONE = {
    "rounds": 10, "positions": 20, "accepted": 5, "judged": 20, "alpha": 0.25, "tau": 1.5,
    "z": 0.5, "log10_evidence": -1.0, "alarm": 0.0,
}  # fmt: skip
OTHER = {
    "rounds": 30, "positions": 60, "accepted": 45, "judged": 50, "alpha": 0.75, "tau": 2.5,
    "z": -4.0, "log10_evidence": 3.5, "alarm": 1.0,
}  # fmt: skip


def test_counts_are_added_and_the_worst_losslessness_stays() -> None:
    found = figures_of([worker(0, 9, v7=ONE), worker(1, 9, v7=OTHER, v8=ONE), {"records": None}])
    assert found["8"] == ONE
    assert found["7"] == {
        "rounds": 40, "positions": 80, "accepted": 50, "judged": 70, "alpha": 50 / 80,
        "tau": pytest.approx(2.25), "z": -4.0, "log10_evidence": 3.5, "alarm": 1.0,
    }  # fmt: skip


def test_ranks_of_a_replica_sample_the_same_tokens() -> None:
    assert tokens_of([worker(0, 100), worker(0, 0), worker(1, 40), {"state": "refused"}]) == 140


def test_the_floor_waits_for_requests_and_an_alarm_does_not() -> None:
    good = ServedVersions(requests=64, accepted=400, reached=1000)
    assert below_floor(good, good) == "" and below_floor(good, None) == ""
    assert below_floor(good._replace(accepted=310), good) == ""
    assert below_floor(good._replace(accepted=290, requests=63), good) == ""
    assert below_floor(good._replace(accepted=290), good).startswith("alpha 0.290 on 64 requests")
    assert "monitor alarms" in below_floor(ServedVersions(1, 0, 0, is_alarmed=True), None)
