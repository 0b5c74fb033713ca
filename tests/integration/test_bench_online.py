"""The benchmark of online learning at sizes that say nothing but that it works; and what its report
makes of figures."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from draftsmith.drafters import checkpoint
from draftsmith.drafters.options import Eagle3Options
from draftsmith.drafters.registry import FAMILIES
from draftsmith.drafters.target.target import Target
from scripts.bench.online import report, run, streams


@pytest.fixture(scope="module")
def work(tiny_target: Callable[..., str], tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny target and an untrained draft stand where those that take minutes would be trained."""
    folder = tmp_path_factory.mktemp("online")
    (folder / "target").symlink_to(tiny_target("llama"))
    target = Target.load(str(folder / "target"))
    draft = FAMILIES["eagle3"].create(Eagle3Options(), target, seed=0)
    checkpoint.save(draft, folder / "seed-0" / "warm", target)
    return folder


@pytest.mark.long
def test_a_stream_is_served_learned_from_and_kept(work: Path, tmp_path: Path) -> None:
    words = ["--work", work, "--out", tmp_path / "online", "--seeds", 1, "--requests", 24]
    arguments = [str(word) for word in [*words, "--only", "sudden"]]
    run.main(arguments)
    (row,) = json.loads((tmp_path / "online.json").read_text())["rows"]
    found = row["result"]
    assert sum(window["requests"] for window in found["windows"]) == 8 + 24
    assert found["updates"] > 0 and found["tokens"] == 32 * 48
    # Nothing is published so soon: what serves is the static draft, scored at the same positions.
    assert all(one["live"] == one["static"] > 0 for one in found["windows"])
    assert (
        found["compared"]["online"] == found["compared"]["static"] != found["compared"]["offline"]
    )
    told = " ".join((tmp_path / "online.md").read_text().split())
    assert "| sudden | 1 |" in told and "| alpha gained | 1 | 0.000 |" in told
    assert (tmp_path / "online.png").stat().st_size > 1000 and not list((work / "room").iterdir())
    (kept,) = (work / "seed-0" / "streams").iterdir()
    written_ns = kept.stat().st_mtime_ns
    run.main(arguments)
    assert kept.stat().st_mtime_ns == written_ns


def test_figures_are_read_off_the_windows() -> None:
    def window(live: float, static: float, positions: int, is_shift: bool = False) -> dict:
        return {"live": live, "static": static, "positions": positions, "is_shift": is_shift}

    result = {
        "windows": [window(0.5, 0.5, 10), window(0.1, 0.3, 10, True), window(0.6, 0.2, 20)],
        "published": 3, "rolled_back": 1, "serve_s": 4.0, "learn_s": 8.0, "tokens": 2000,
        "compared": {"static": 0.3, "online": 0.5, "offline": 0.625},
    }  # fmt: skip
    rows = [{"cell": {"stream": "sudden", "seed": 0}, "result": result}]
    told = " ".join(report.tables(rows).split())
    assert (
        "| sudden | 1 | 0.300 | 0.450 | 0.150 | 0 of 2 | +0.000 | 3, 1 | 2.00 | 4.00 |" in told
    ), told
    assert "| alpha gained | 1 | 0.200 |" in told
    assert "| share of an offline draft's alpha, same texts | 1 | 0.800 |" in told


def test_streams_shift_as_they_are_named() -> None:
    first, *_, last = np.array_split([name == "b" for name in streams.gradual("a", "b", 4000)], 8)
    assert first.mean() < 0.12 and last.mean() > 0.88
    assert streams.turns(("a", "b"), 8, 2) == [*"a" * 8, *"b" * 8] * 2
    whole = streams.STREAMS["day"](400)
    assert len(whole.ends) == 72 and whole.ends[-1] == len(whole.domains)
    assert set(whole.domains[: whole.ends[17]]) == {"code"}
    assert set(whole.domains[whole.ends[17] : whole.ends[35]]) == {"prose"}
    loads = np.diff([0, *whole.ends])
    assert loads.argmax() in range(30, 42) and loads.min() < loads.max() / 3
