"""Figures of scripts/bench_fleet loop from records, and the table beside the own engine."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest

from draftsmith.record import RoundRecord, hashed
from scripts.bench.fleet.answers import Answer, acceptance, alpha_of, parts_of, texts_of
from scripts.bench.fleet.own import table

BASE = RoundRecord(
    "", 0, "", "t", "rev", "1", 1.0, 1.0, 0, 1.0, 0.0, 2, [5, 6], [7, 8, 9], 1, [7, 3], 3, last=True
)


def test_alpha_counts_positions_up_to_the_first_rejected_one() -> None:
    whole = dataclasses.replace(BASE, accepted=3)
    found = alpha_of([BASE, whole, dataclasses.replace(BASE, drafted=[], accepted=0)])
    assert found["rounds"] == 2
    assert found["alpha"] == pytest.approx(4 / 5) and found["tau"] == pytest.approx(3.0)


def test_versions_are_apart_and_changed_texts_are_seen() -> None:
    answers = [
        Answer("cmpl-a", [5, 6], [7, 3], is_code=True),
        Answer("cmpl-b", [5, 6], [7, 3], is_code=False),
        Answer("cmpl-c", [5, 6], [7, 4], is_code=False),
        Answer("cmpl-d", [5, 6], [7, 3], is_code=False),
    ]
    records = {}
    for answer, version in zip(answers[:3], ("1", "2", "10")):
        name = hashed(f"{answer.id}-0")
        records[name.partition("-")[0]] = [
            dataclasses.replace(BASE, request=name, draft_version=version)
        ]
    assert texts_of(answers, records) == {"recorded": 3, "equal_texts": 2}
    found = acceptance(answers, records)
    assert list(found["prose"]) == ["2", "10"] and found["code"]["rounds"] == 1


def test_parts_follow_the_order_of_the_requests() -> None:
    assert list(parts_of(list(range(7)), 3)) == [[0, 1], [2, 3], [4, 5, 6]]
    answers = [Answer(f"cmpl-{n}", [5, 6], [7, 3], is_code=False) for n in range(12)]
    records = {}
    for place, answer in enumerate(answers):
        name = hashed(f"{answer.id}-0")
        one = dataclasses.replace(BASE, request=name, accepted=3 if place >= 10 else 1)
        records[name.partition("-")[0]] = [one]
    found = acceptance(answers, records)
    assert [one["alpha"] for one in found["parts"]] == [0.5] * 5 + [1.0]


def test_the_own_engine_stands_beside_the_fleet() -> None:
    def figures(alpha: float) -> dict[str, Any]:
        one = {"rounds": 9, "alpha": alpha, "tau": 1 + alpha}
        return {"code": one, "prose": {"1": one}, "parts": [one, one], "last_quarter": one}

    rows = table(figures(0.25), figures(0.5) | {"prose": {}})
    assert rows[2] == "| code | 0.250, 1.250 | 0.500, 1.500 |"
    assert rows[3] == "| prose, first draft | 0.250, 1.250 | - |"
    assert [row.split(" |")[0] for row in rows[4:]] == [
        "| prose, part 1 of 2", "| prose, part 2 of 2", "| prose, last quarter"
    ]  # fmt: skip
