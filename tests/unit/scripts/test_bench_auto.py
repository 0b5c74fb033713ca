"""Benchmark of `--k auto` in one process, at sizes that say nothing but that it works."""

from __future__ import annotations

import json
import random
from collections import Counter
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path

import pytest

from scripts.bench.engine import auto, auto_where


@pytest.fixture
def rows(
    tiny_target: Callable[..., str],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> list[auto.Row]:
    (tmp_path / "target").symlink_to(tiny_target("llama"))
    sizes = "--prompts 4 --prompt-tokens 6 --max-tokens 8 --repeats 2 --streams 1 2 --k 1 2"
    folders = f"--run {tmp_path} --draft {tmp_path / 'target'} --out {tmp_path / 'auto.json'}"
    monkeypatch.setattr("sys.argv", ["auto", *folders.split(), *sizes.split()])
    auto.main()
    found: list[auto.Row] = json.loads((tmp_path / "auto.json").read_text())["rows"]
    told = capsys.readouterr().out
    assert all(f"| {row['engine']} | {row['temperature']:g} |" in told for row in found)
    return found


@pytest.mark.long
def test_each_engine_drafts_what_its_name_says(rows: list[auto.Row]) -> None:
    assert {(row["engine"], row["temperature"], row["streams"]) for row in rows} == {
        (engine, temperature, streams)
        for engine in (auto.NONE, auto.AGAIN, auto.IDLE, "k = 1", "k = 2", auto.AUTO)
        for temperature in (0.0, 1.0)
        for streams in (1, 2)
    }
    for row in rows:
        deepest = max(map(int, row["rounds_by_k"]))
        if row["engine"] in (auto.NONE, auto.AGAIN, auto.IDLE):
            assert deepest == 0
        elif row["engine"] != auto.AUTO:
            assert row["engine"] == f"k = {deepest}"


@pytest.mark.long
def test_ratios_are_those_of_the_same_turn(rows: list[auto.Row]) -> None:
    for row in rows:
        assert row["lowest"] <= row["over_none"] <= row["highest"]
        assert ("over_best" in row) == (row["engine"] == auto.AUTO)
        if row["engine"] == auto.NONE:
            assert row["lowest"] == row["highest"] == 1.0


def test_no_engine_follows_itself() -> None:
    """And each is as often behind every other."""
    names, chance = ["a", "b", "c", "d"], random.Random(0)
    played: list[str] = list(names)
    order = names
    for _ in range(600):
        order = auto.next_order(order, chance)
        assert sorted(order) == names
        played += order
    pairs = Counter(pairwise(played))
    assert len(pairs) == 12 and max(pairs.values()) < 1.4 * min(pairs.values())


def test_the_best_fixed_k_may_be_none() -> None:
    def of(engine: str, over_none: float) -> auto.Row:
        return {"engine": engine, "over_none": over_none}

    assert auto.with_best([of("k = 1", 0.5), of(auto.AUTO, 0.9)])[1]["over_best"] == 0.9
    assert auto.with_best([of("k = 1", 1.5), of(auto.AUTO, 1.2)])[1]["over_best"] == 1.2 / 1.5


@pytest.fixture
def measured(
    tiny_target: Callable[..., str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> Callable[[str], list[auto.Row]]:
    """`measured(options)` -> the rows that the script writes of a tiny target, its own draft."""

    def run(options: str) -> list[auto.Row]:
        (tmp_path / "target").symlink_to(tiny_target("llama"))
        folders = f"--run {tmp_path} --draft {tmp_path / 'target'} --out {tmp_path / 'out.json'}"
        monkeypatch.setattr("sys.argv", ["auto", *folders.split(), *options.split()])
        auto.main()
        rows: list[auto.Row] = json.loads((tmp_path / "out.json").read_text())["rows"]
        return rows

    return run


@pytest.mark.long
def test_parts_are_engines_that_draft_nothing_but_k_auto(
    measured: Callable[[str], list[auto.Row]], capsys: pytest.CaptureFixture[str]
) -> None:
    rows = measured("--parts --prompts 2 --prompt-tokens 6 --max-tokens 8 --repeats 1 --streams 2")
    told = capsys.readouterr().out
    assert len(rows) == 12 and all(row["median_us"] > 0 for row in rows)
    for row in rows:
        assert f"| {row['engine']} | {row['temperature']:g} |" in told
        assert row["engine"] == auto.AUTO or set(row["rounds_by_k"]) == {"0"}
        assert row["calls"] > 50 or row["engine"] == auto.AUTO, "whose answers end soon"
        if row["engine"] == auto.NONE:
            assert row["over_none"] == 1.0 and row["mean_more_us"] == 0.0


@pytest.mark.long
def test_time_over_no_draft_is_booked_by_the_kind_of_round(
    measured: Callable[[str], list[auto.Row]], capsys: pytest.CaptureFixture[str]
) -> None:
    rows = measured("--where --prompts 2 --prompt-tokens 6 --max-tokens 24 --repeats 2 --streams 1")
    told = capsys.readouterr().out
    assert len(rows) == 2 * 2 * 3
    for row in rows:
        assert f"| {row['engine']} | {row['temperature']:g} | 1 | {row['turns']} |" in told
        answers = 2 if row["turns"] == "first" else 4
        rounds = row["rounds"]
        assert rounds[auto_where.PROMPTS] == rounds[auto_where.ARRIVALS] == answers
        drafted = rounds[auto_where.LATE] + rounds[auto_where.DRAFTED]
        if row["engine"] == auto.AUTO:
            assert rounds[auto_where.MEASURED] + rounds[auto_where.REST] + drafted > 0
            begins = row["turns"] == "first" and row["temperature"] == 0
            assert drafted > 0 or not begins, "before anything is known it drafts"
        else:
            assert rounds[auto_where.REST] == 23 * answers and drafted == 0
        for kind, count in rounds.items():
            shares = row["more_us"][kind] * count / 1e6 / row["none_s"]
            assert row["share"][kind] == pytest.approx(shares)
