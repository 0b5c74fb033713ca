"""Parts of a step's time: a part within another counts once, each depth for itself."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from scripts.bench.drafters.cells import OURS, SPECFORGE, THEIRS, Plan
from scripts.bench.drafters.parts import Parts
from scripts.bench.drafters.step_parts import sides_of, table


def test_a_part_within_another_counts_for_itself_alone() -> None:
    clock = iter([0.0, 1.0, 3.0, 10.0])
    parts = Parts(lambda: next(clock))
    with parts.timed("outer"), parts.timed("inner"):
        pass
    assert parts.seconds == {"outer": 8.0, "inner": 2.0}


def test_what_the_device_still_computes_counts_for_its_part() -> None:
    now_s = given_s = 0.0

    def done() -> None:
        nonlocal now_s, given_s
        now_s, given_s = now_s + given_s, 0.0

    parts = Parts(lambda: now_s, done)
    given_s = 5.0  # by nobody's part
    with parts.timed("head"):
        given_s = 2.0
    with parts.timed("backward"):
        given_s = 3.0
    assert parts.seconds == {"head": 2.0, "backward": 3.0}


@pytest.mark.parametrize("beside", [["a/before", "b/before"], ["a/here"]])
def test_checkouts_of_one_name_are_refused(beside: list[str]) -> None:
    with pytest.raises(SystemExit, match=r"give --beside a folder of another name$"):
        sides_of([Path(one) for one in beside])
    assert [one.name for one in sides_of([Path("a/before")])] == ["here", "before"]


def test_what_is_done_between_depths_is_none_of_theirs() -> None:
    now_s = 0.0

    def unroll() -> Iterator[str]:
        nonlocal now_s
        for spent_s in (1.0, 2.0):
            now_s += spent_s
            yield "step"

    parts = Parts(lambda: now_s)
    for _ in parts.by_depth(unroll)():
        now_s += 5.0
    assert parts.seconds == {"depth 1": 1.0, "depth 2": 2.0}


@pytest.mark.parametrize("sides", [["here"], ["here", "before"]])
def test_the_table_shows_milliseconds_of_a_step_and_the_rest(sides: list[str]) -> None:
    rows = [
        {
            "family": "eagle3", "side": side, "turn": turn, "steps": 10, "seconds": 1.0 + turn,
            "tokens_per_s": 100.0, "training_bytes": 2**20, "parts": {"target": 0.5, "depth 1": 0.2},
        }
        for side in sides
        for turn in (0, 1)
    ]  # fmt: skip
    lines = table(rows)
    assert len(lines) == 2 + len(sides)
    cells = [cell.strip() for cell in lines[2].strip("|").split("|")]
    assert cells[0] == ("eagle3" if len(sides) == 1 else "eagle3, here")
    assert cells[3].startswith("150 ") and cells[4:6] == ["50.0", "20.0"] and cells[-1] == "80.0"


def test_a_peer_is_trained_with_as_many_texts_and_steps_as_ours() -> None:
    plan = Plan(
        families=(), objectives=(), peers=(THEIRS, SPECFORGE), seeds=1, minutes=1.0,
        row_tokens=160, served=False, warm_s=6.0,
    )  # fmt: skip
    cells = {cell.name: cell.arguments for cell in plan.equal(0)}
    for texts in ("8", "1"):
        ours = cells[f"{OURS}, {texts} a step"]
        assert ours[1:3] == ("--batch-size", texts) and "unroll.steps=4" in ours
        assert cells[f"{SPECFORGE}, {texts} a step"] == (texts, "4", "6.0")
        theirs = cells[f"{THEIRS}, {texts} a step"]
        assert theirs[-2:] == ("--total-seq-len", str(160 * int(texts)))
    for cell in plan.equal(0):
        assert cell.trainer == cell.name.split(",")[0]
