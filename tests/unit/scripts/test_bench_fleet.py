"""Figures of scripts/bench_fleet from records, and its verdicts."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest

from draftsmith.record import RoundRecord, hashed
from scripts.bench.fleet.answers import Answer, acceptance, alpha_of, texts_of
from scripts.bench.fleet.run import verdict

BASE = RoundRecord(
    "",
    round=0,
    target="t",
    target_revision="rev",
    draft_version="1",
    time_s=1.0,
    position=2,
    context=[5, 6],
    drafted=[7, 8, 9],
    accepted=1,
    committed=[7, 3],
    emitted=3,
    last=True,
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


HELD: dict[str, Any] = {
    "requests": 9, "failed": 0, "equal_texts": 9, "z": {"accepted": 1.0}, "violations": 0,
    "engines": [{"version": 4}, {"version": 4}], "live": 4,
}  # fmt: skip


def test_a_run_that_held_has_no_sentence() -> None:
    assert list(verdict(HELD)) == []


@pytest.mark.parametrize(
    "changed",
    [
        {"failed": 1}, {"equal_texts": 8}, {"z": {"accepted": 3.1}}, {"z": {}}, {"violations": 2},
        {"engines": [{"version": 4}, {"version": 3}]}, {"engines": []},
        {"requests": 0, "equal_texts": 0},
    ],
)  # fmt: skip
def test_a_run_with_one_thing_wrong_has_one_sentence(changed: dict[str, Any]) -> None:
    assert len(list(verdict(HELD | changed))) == 1
