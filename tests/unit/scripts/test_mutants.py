"""The check that wrong edits are noticed (`scripts/test --mutants`): its verdicts on a project of
one file, and its own list."""

from __future__ import annotations

import os
import subprocess
import sys
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import yaml

from scripts.mutants.entries import load, outdated

ROOT = Path(__file__).resolve().parents[3]

LEAST = {"kernels": 18, "drafters": 14, "serve": 18, "distill": 10}

CODE = """def last(values):
    return values[len(values) - 1]


def down(number):
    while number > 0:
        number = number - 1
    return number
"""
TESTS = """import pytest
from sums import down, last


@pytest.fixture
def three():
    return last([1, 2, 3])


def test_last(three):
    assert three == 3


def test_type():
    assert isinstance(last([1]), int)


def test_down():
    assert down(3) == 0


def test_wrong():
    assert last([1]) == 2


def test_error():
    with pytest.raises(TypeError):
        last(3)


@pytest.mark.parametrize("values", [[1], [1, 2]])
def test_some(values):
    assert last(values) == values[-1]
"""


def entry(name: str, old: str, new: str, *tests: str, **more: Any) -> dict[str, Any]:
    named = [f"tests/test_sums.py::{test}" for test in tests]
    return {
        "id": name,
        "file": "src/sums.py",
        "old": old,
        "new": new,
        "why": "wrong sums",
        "tests": named,
        **more,
    }


KILLED = entry("killed", "len(values) - 1]", "0]", "test_last")
SURVIVED = entry("survived", "len(values) - 1]", "0]", "test_type")
ENDLESS = entry("endless", "number - 1", "number", "test_down")
HANG = entry("hang", "number - 1", "number", "test_down", hang=True)
TWICE = entry("twice", "number", "count", "test_down")
BROKEN = entry("broken", "def last(", "def first(", "test_last")


SET_UP = entry("set-up", "len(values) - 1]", "len(values)]", "test_last")


RED = entry("red", "len(values) - 1]", "0]", "test_wrong")


@pytest.fixture
def project(tmp_path: Path) -> Path:
    for name, text in (
        ("src/sums.py", CODE),
        ("tests/test_sums.py", TESTS),
        ("pyproject.toml", "[tool.pytest.ini_options]\n"),
    ):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(text)
    return tmp_path


def check(project: Path, entries: list[dict[str, Any]], *names: str) -> tuple[int, str]:
    (project / "tests" / "mutants").mkdir()
    (project / "tests" / "mutants" / "all.yaml").write_text(yaml.safe_dump(entries))
    code = f"""
import sys
from pathlib import Path
sys.path.insert(0, {str(ROOT)!r})
from scripts.mutants.check import check
sys.exit(check(Path({str(project)!r}), {names!r}, workers=2, preloaded=(), least_limit_s=3.0))
"""
    plain = {**os.environ, "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1"}
    finished = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=120, env=plain
    )
    return finished.returncode, finished.stdout + finished.stderr


def results(output: str) -> dict[str, str]:
    lines = output.split("  by\n")[1].split("\n\n")[0].splitlines()
    return {line.split()[0]: line.split()[2] for line in lines}


def test_each_edit_gets_its_verdict_and_the_project_stays_as_it_was(project: Path) -> None:
    entries = [KILLED, SURVIVED, ENDLESS, HANG, TWICE, BROKEN, SET_UP, RED]
    status, output = check(project, entries)
    invalid = dict.fromkeys(("endless", "twice", "broken", "set-up", "red"), "invalid")
    assert status == 1, output
    assert results(output) == {
        "killed": "killed",
        "survived": "survived",
        "hang": "killed",
        **invalid,
    }
    assert (
        "`old` occurs 5 times" in output
        and "without the edit" in output
        and "no end after" in output
    )
    assert "pytest's status 4" in output and "pytest's status 1" in output
    assert (project / "src" / "sums.py").read_text() == CODE


def test_the_list_fits_the_code() -> None:
    """Sixty edits and more, each applying at one place, each with tests that exist."""
    mutants = load(ROOT)
    assert not {mutant.id: why for mutant in mutants if (why := outdated(mutant, ROOT))}
    counts = Counter(mutant.folder for mutant in mutants)
    assert all(counts[folder] >= least for folder, least in LEAST.items()), counts
    assert len(mutants) >= 60


def test_an_outdated_entry_is_seen(project: Path) -> None:
    (project / "tests" / "mutants").mkdir()
    names = {"text": "gone from", "tests": ["tests/test_sums.py::test_gone"]}
    wrong = [
        {**KILLED, "id": "old", "old": names["text"]},
        {**KILLED, "id": "test", "tests": names["tests"]},
        {**KILLED, "id": "file", "file": "src/gone.py"},
        {**KILLED, "id": "same", "new": KILLED["old"]},
        {**KILLED, "id": "syntax", "new": "0"}, {**KILLED, "id": "none", "tests": []},
    ]  # fmt: skip
    (project / "tests" / "mutants" / "all.yaml").write_text(yaml.safe_dump([KILLED, *wrong]))
    reasons = {mutant.id: outdated(mutant, project) for mutant in load(project)}
    assert reasons.pop("killed") == "" and all(reasons.values())
