"""Lines of `draftsmith top` from an answer's data, without a terminal."""

from __future__ import annotations

import re
from typing import Any

import pytest

from draftsmith.serve.metrics.top import BLOCKS, STYLES, one_line, screen

DATA: dict[str, Any] = {
    "model": "tiny",
    "time_s": 2000.0,
    "facts": [["tau", "1.75", ""], ["alarms", "1", "alarm"]],
    "tables": [
        {
            "title": "Classes",
            "head": ["class", "tau"],
            "rows": [
                {"mark": "", "cells": ["code", "1.75"]},
                {"mark": "alarm", "cells": ["a longer name", "-"]},
            ],
        }
    ],
    "points": [{"tau": 1.0}, {"tau": None}, {"tau": 3.0}],
}


def test_facts_tables_and_tau_over_time_are_on_the_screen() -> None:
    shown = screen(DATA)
    for wanted in (
        "tiny",
        f"1.75  {BLOCKS[0]} {BLOCKS[7]}",
        "class          tau",
        "code           1.75",
    ):
        assert wanted in shown
    assert f"{STYLES['alarm']}a longer name  -" in shown
    assert one_line(DATA).endswith("tiny: tau 1.75, alarms 1")
    assert "it does not answer" in screen(DATA, "it does not answer")


@pytest.mark.parametrize(("width", "height"), [(80, 24), (20, 5), (1, 2), (300, 200)])
def test_a_screen_is_never_larger_than_the_window(
    width: int, height: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", str(width))
    monkeypatch.setenv("LINES", str(height))
    plain = re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", screen(DATA))
    lines = plain.split("\n")
    assert len(lines) <= height and all(len(line) <= width for line in lines)


def test_names_from_clients_cannot_steer_the_terminal() -> None:
    rows = [{"mark": "", "cells": ["\x1b[2J\x07evil\r\n", "\x1b]0;title\x07"]}]
    table = {"title": "\x1b[2J", "head": ["a", "b"], "rows": rows}
    drawn = screen(DATA | {"model": "\x1b[31mred\nline", "tables": [table]})
    assert "\x07" not in drawn and "\x1b[2J" not in drawn and "\x1b]" not in drawn
    assert one_line(DATA | {"model": "\x1b[31mred\nline"}).isprintable()
