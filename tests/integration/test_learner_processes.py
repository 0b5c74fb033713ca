"""A learner whose target is run by several processes learns what one process learns."""

from __future__ import annotations

import json
import os
import signal
import sys
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from draftsmith.config import to_dict
from draftsmith.distill import command
from draftsmith.distill.config import DistillConfig
from draftsmith.distill.state import StateFolder
from draftsmith.errors import UserError
from tests.forked import Forked, Ranks, free_port

ENVIRONMENT = {"OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""}


def distil(config: DistillConfig, processes: int = 1) -> Forked | Ranks:
    path = Path(config.versions).with_suffix(".json")
    path.write_text(json.dumps(to_dict(config)), encoding="utf-8")
    words = [sys.executable, "-m", "draftsmith.cli", "distill", "--config", str(path)]
    environment = os.environ | ENVIRONMENT
    if processes == 1:
        return Forked(words, env=environment)
    return Ranks(words, processes, free_port(), environment)


def finish(process: Forked | Ranks) -> None:
    said, _ = process.communicate(timeout=240)
    assert process.returncode == 0, said


def learned(made: Any, versions: Path) -> tuple[dict[str, torch.Tensor], list[dict[str, Any]]]:
    """Weights of the candidate, and what was decided."""
    decisions = [json.loads(line) for line in (versions / "decisions.jsonl").open()]
    clock = {"time_s", "share"}
    told = [{key: one[key] for key in one if key not in clock} for one in decisions]
    return made.state(versions)["candidate"], told


@pytest.mark.parametrize(
    "processes, shares", [(2, 2), pytest.param(2, 1, marks=pytest.mark.long),
                          pytest.param(4, 2, marks=pytest.mark.long)]
)  # fmt: skip
def test_several_processes_learn_what_one_learns(
    loop: Callable[..., Any], processes: int, shares: int
) -> None:
    made = loop("eagle3")
    made.serve(24)
    gate = replace(made.config.gate, requests=2)
    config = replace(made.config, gate=gate, learn=replace(made.config.learn, steps=6))
    alone, spread = (made.root / name for name in ("alone", "spread"))
    finish(distil(replace(config, versions=str(alone))))
    finish(distil(replace(config, versions=str(spread), target_shares=shares), processes))
    (one, told), (several, also_told) = learned(made, alone), learned(made, spread)
    assert told and told == also_told
    assert all(torch.equal(one[name], several[name]) for name in one)
    begun = made.draft.state_dict()
    assert any(not torch.equal(one[name], begun[name]) for name in one), "nothing was learned"


@pytest.mark.long
@pytest.mark.parametrize("killed", [0, 1])
def test_all_end_with_one_that_is_killed_and_a_restart_goes_on(
    loop: Callable[..., Any], killed: int
) -> None:
    made = loop("eagle3")
    made.serve(24)
    config = replace(
        made.config, until_idle_s=None, save_s=0.0, learn=replace(made.config.learn, steps=6)
    )
    run = distil(config, 2)
    assert isinstance(run, Ranks)
    deadline_s = time.monotonic() + 120
    while not StateFolder(made.versions).numbers() and time.monotonic() < deadline_s:
        time.sleep(0.05)
    run.processes[killed].send_signal(signal.SIGKILL)
    made.serve(40, seed=1)  # the first process has texts to read, and meets nobody
    other = run.processes[1 - killed]
    assert other.wait(60) != 0
    finish(distil(replace(config, until_idle_s=0.3), 2))
    assert made.status()["updates"] >= 1 and made.status()["records"] > 0


def test_what_several_processes_cannot_do_is_refused(
    loop: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    made = loop()
    wrong = [
        (1, {"target_shares": 2}, "'target_shares' is 2 but 1 processes run"),
        (3, {"target_shares": 2}, "'target_shares' is 2 but 3 processes run"),
        (2, {"target_shares": 2, "dtype": "int8"}, "layers are not spread"),
        (2, {"learn": replace(made.config.learn, teacher="recorded")}, "no target is run"),
        (2, {"device": "cuda:1"}, "each process takes a device of its own"),
    ]
    for processes, changes, says in wrong:
        monkeypatch.setenv("WORLD_SIZE", str(processes))
        with pytest.raises(UserError, match=says):
            command.run(replace(made.config, **changes))
    assert not (made.versions / "learner.lock").exists()
