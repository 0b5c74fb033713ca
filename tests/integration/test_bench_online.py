"""The benchmark of online learning at sizes that say nothing but that it works."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from draftsmith.drafters import checkpoint
from draftsmith.drafters.options import Eagle3Options
from draftsmith.drafters.registry import FAMILIES
from draftsmith.drafters.target.target import Target
from scripts.bench.online import run


@pytest.fixture(scope="module")
def work(target_folder: str, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny target and an untrained draft stand where those that take minutes would be trained."""
    folder = tmp_path_factory.mktemp("online")
    (folder / "target").symlink_to(target_folder)
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
