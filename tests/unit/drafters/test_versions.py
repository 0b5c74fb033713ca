"""Versions on disk: whole or absent at every kill point, hashes checked, decisions durable."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from draftsmith.drafters import versions
from draftsmith.errors import UserError


def publish(root: Path, text: str = "weights", *, parent: int | None = None) -> int:
    def save(folder: Path) -> None:
        (folder / "config.json").write_text("{}")
        (folder / "model.safetensors").write_text(text)

    return versions.publish(
        root,
        save,
        family="fake",
        target={"name": "t"},
        parent=parent,
        data_range={"records": 3},
        gate={"gain": 0.1},
    )


def test_published_version_is_latest_and_opens(tmp_path: Path) -> None:
    assert versions.latest(tmp_path) is None
    assert publish(tmp_path, "one") == 1
    assert publish(tmp_path, "two", parent=1) == 2
    assert versions.latest(tmp_path) == 2
    assert (versions.open_version(tmp_path, 2) / "model.safetensors").read_text() == "two"
    manifest = versions.read_manifest(tmp_path, 2)
    assert (
        manifest["parent"] == 1
        and manifest["family"] == "fake"
        and manifest["gate"] == {"gain": 0.1}
    )
    assert set(manifest["hashes"]) == {"config.json", "model.safetensors"}


@pytest.mark.parametrize("damage", ["flip", "truncate", "delete", "manifest", "keys"])
def test_damaged_version_is_refused_in_one_sentence(tmp_path: Path, damage: str) -> None:
    publish(tmp_path, "good weights")
    folder = versions.folder_of(tmp_path, 1)
    weights = folder / "model.safetensors"
    match damage:
        case "flip":
            weights.write_text("good weighty")
        case "truncate":
            weights.write_text("good")
        case "delete":
            weights.unlink()
        case "manifest":
            (folder / "manifest.json").write_text('{"schema": 1, "ver')
        case "keys":
            (folder / "manifest.json").write_text('{"schema": 1, "version": 1, "hashes": {}}')
    with pytest.raises(UserError, match=r"version 1"):
        versions.open_version(tmp_path, 1)


def test_rollback_points_back_logs_and_keeps_numbers_monotone(tmp_path: Path) -> None:
    publish(tmp_path, "one")
    publish(tmp_path, "two")
    versions.rollback(tmp_path, 1, "acceptance fell")
    assert versions.latest(tmp_path) == 1
    assert publish(tmp_path, "three") == 3
    (decision,) = versions.read_decisions(tmp_path)
    assert (
        decision["decision"] == "rolled back" and decision["version"] == 1 and decision["left"] == 2
    )
    assert decision["reason"] == "acceptance fell"


def test_rollback_to_a_corrupt_version_changes_nothing(tmp_path: Path) -> None:
    publish(tmp_path, "one")
    publish(tmp_path, "two")
    (versions.folder_of(tmp_path, 1) / "model.safetensors").write_text("xxx")
    with pytest.raises(UserError):
        versions.rollback(tmp_path, 1, "try")
    assert versions.latest(tmp_path) == 2 and versions.read_decisions(tmp_path) == []


def test_failing_save_leaves_the_last_version(tmp_path: Path) -> None:
    publish(tmp_path, "one")

    def save(folder: Path) -> None:
        (folder / "model.safetensors").write_text("half")
        raise OSError(28, "No space left on device")

    with pytest.raises(OSError):
        versions.publish(tmp_path, save, family="fake", target={}, parent=1, data_range={}, gate={})
    assert versions.latest(tmp_path) == 1 and versions.versions(tmp_path) == [1]
    assert sorted(path.name for path in tmp_path.iterdir()) == ["current", "v000001"]


def test_prune_keeps_first_live_parent_and_newest(tmp_path: Path) -> None:
    for number in range(1, 7):
        publish(tmp_path, str(number), parent=number - 1 or None)
    versions.rollback(tmp_path, 4, "test")
    assert versions.prune(tmp_path, keep=1) == [2, 5]
    assert versions.versions(tmp_path) == [1, 3, 4, 6]
    versions.open_version(tmp_path, 4)


def test_garbled_current_is_named(tmp_path: Path) -> None:
    (tmp_path / "current").write_text("seven")
    with pytest.raises(UserError, match="seven"):
        versions.latest(tmp_path)


@given(cut=st.integers(min_value=0, max_value=400))
@settings(max_examples=40, deadline=None)
def test_torn_decision_line_spoils_only_itself(cut: int) -> None:
    with tempfile.TemporaryDirectory() as name:
        root = Path(name)
        for number in range(3):
            versions.record_decision(
                root, {"decision": "hold", "number": number, "gain": float("nan")}
            )
        whole = (root / "decisions.jsonl").read_bytes()
        (root / "decisions.jsonl").write_bytes(whole[: min(cut, len(whole))])
        survivors = whole[: min(cut, len(whole))].count(b"\n") + (
            0 < cut < len(whole) and whole[cut : cut + 1] == b"\n"
        )
        versions.record_decision(root, {"decision": "accept", "number": 9})
        numbers = [decision["number"] for decision in versions.read_decisions(root)]
        assert numbers == [*range(survivors), 9]
        assert "NaN" not in (root / "decisions.jsonl").read_text()


KILLED = """
import os, sys
from pathlib import Path
from draftsmith.drafters import versions
root, point = Path(sys.argv[1]), int(sys.argv[2])
calls = 0
def trace(event, args):
    # Every rename, open for writing and mkdir is a point at which the machine may stop the process.
    global calls
    if event in ("os.rename", "os.mkdir", "open", "os.remove", "shutil.rmtree") and str(root) in str(args[0]):
        calls += 1
        if calls == point:
            os.kill(os.getpid(), 9)
def save(folder):
    (folder / "model.safetensors").write_text("new" * 1000)
sys.addaudithook(trace)
versions.publish(root, save, family="fake", target={}, parent=1, data_range={}, gate={})
versions.record_decision(root, {"decision": "accept", "version": 2})
print(calls)
"""


def test_kill_at_every_file_operation_leaves_a_readable_version(tmp_path: Path) -> None:
    outcomes = set()
    for point in range(1, 60):
        root = tmp_path / str(point)
        publish(root, "old")
        done = subprocess.run(
            [sys.executable, "-c", KILLED, str(root), str(point)],
            capture_output=True,
            text=True,
            check=False,
        )
        live = versions.latest(root)
        assert live is not None
        text = (versions.open_version(root, live) / "model.safetensors").read_text()
        assert text == ("old" if live == 1 else "new" * 1000)
        outcomes.add(live)
        for line in (
            (root / "decisions.jsonl").read_text().splitlines()
            if (root / "decisions.jsonl").exists()
            else []
        ):
            json.loads(line)
        # The next learner goes on over whatever was left behind.
        assert publish(root, "next") > live
        assert not [path for path in os.listdir(root) if path.endswith((".tmp", ".old"))]
        if done.returncode == 0:
            break
    assert done.returncode == 0, done.stderr
    assert point > 5 and outcomes == {1, 2}
