"""`draftsmith doctor` under a launcher: devices, collectives, a target in shares."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from draftsmith.drafters import checkpoint
from draftsmith.drafters.options import OPTIONS
from draftsmith.drafters.registry import FAMILIES
from draftsmith.drafters.target.target import Target
from draftsmith.train.doctor import processes
from draftsmith.train.doctor.finding import FAIL, OK
from tests.forked import Ranks, free_port, run

ENVIRONMENT = {"OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""}


def doctor(*options: str, count: int = 2) -> tuple[int, list[str]]:
    """Exit status, and what each process wrote."""
    words = [sys.executable, "-m", "draftsmith.cli", "doctor", *options]
    ranks = Ranks(words, count, free_port(), os.environ | ENVIRONMENT)
    said = [one.communicate(240)[0] or "" for one in ranks.processes]
    return ranks.returncode or 0, said


@pytest.mark.long
def test_processes_are_examined_and_a_target_in_shares(
    tiny_target: Callable[..., str], tmp_path: Path
) -> None:
    target, draft = tiny_target("llama"), str(tmp_path / "draft")
    loaded = Target.load(target)
    drafter = FAMILIES["eagle3"].create(OPTIONS["eagle3"](), loaded, seed=0)
    checkpoint.save(drafter, draft, loaded)
    pair = ("--target", target, "--draft", draft, "--json")
    status, (first, other) = doctor(*pair, "--target-shares", "2")
    found = {one["check"]: one for one in json.loads(first[first.index("{") :])["findings"]}
    assert status == 0, first
    assert {one["status"] for name, one in found.items() if "processes" in name} == {OK}
    assert "2 processes: " in found["processes.devices"]["what"]
    assert "summed over 2 processes" in found["processes.collectives"]["what"]
    words = found["processes.shares"]["what"].split()
    assert words[:3] == ["2", "processes", "hold"]
    whole, held = float(words[3]), float(words[7])
    # Embeddings, last norm and head are held by both.
    assert whole / 2 < held < whole
    # The checks of one process are made too, and one process alone reports.
    alone = run(
        [sys.executable, "-m", "draftsmith.cli", "doctor", *pair],
        env=os.environ | ENVIRONMENT, capture_output=True, timeout=240,
    )  # fmt: skip
    expected = {one["check"]: one["status"] for one in json.loads(alone.stdout)["findings"]}
    # Products are laid out where a process has them whole.
    assert expected.pop("cpu.ways") == OK
    assert expected.items() <= {name: one["status"] for name, one in found.items()}.items()
    assert "processes." not in other


def test_a_device_that_two_have_or_one_lacks_is_named() -> None:
    def finding(*places: tuple[str, str]) -> tuple[str, str, str]:
        one = processes.device_finding(list(places))
        return one.status, one.what, one.mend

    assert finding(("a cuda:0", ""), ("a cuda:1", ""), ("b cuda:0", ""))[0] == OK
    assert finding(("a cpu", ""), ("a cpu", ""))[0] == OK
    status, what, _ = finding(("a cuda:0", ""), ("a cuda:0", ""))
    assert status == FAIL and what == "2 processes have the device a cuda:0"
    status, what, mend = finding(("a cuda:0", ""), ("", "device is 'cuda:1', none; give cpu"))
    assert (status, what) == (FAIL, "process 1: device is 'cuda:1', none") and mend == "give cpu"


@pytest.mark.parametrize("options", [("--target-shares", "3"), ("--url", "http://127.0.0.1:9")])
def test_what_processes_cannot_examine_is_refused(
    options: tuple[str, ...], tmp_path: Path, monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:  # fmt: skip
    from draftsmith.cli import main

    monkeypatch.setenv("WORLD_SIZE", "2")
    target = () if "--url" in options else ("--target", str(tmp_path))
    assert main(["doctor", *target, *options]) == 2
    said = capsys.readouterr().err
    assert "start a multiple of 3" in said or "one process asks a server" in said
