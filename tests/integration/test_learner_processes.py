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
from safetensors.torch import load_file

from draftsmith.config import to_dict
from draftsmith.distill import command
from draftsmith.distill.config import DistillConfig
from draftsmith.distill.state import StateFolder
from draftsmith.errors import UserError
from tests.forked import Forked, Ranks, free_port
from tests.integration.conftest import LEARN

ROOT = Path(__file__).resolve().parents[2]
# The order of sums shows in bfloat16.
EXACT = replace(LEARN, dtype="float32")
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


@pytest.mark.long
@pytest.mark.parametrize("processes, shares", [(2, 1), (2, 2), (4, 2)])
def test_several_processes_learn_what_one_learns(
    loop: Callable[..., Any], processes: int, shares: int
) -> None:
    """To the bit: they read texts, and one of them trains."""
    made = loop("eagle3")
    made.serve(24)
    learn = replace(EXACT, steps=6, batch=5, proximal=10.0)
    config = replace(made.config, gate=replace(made.config.gate, requests=2), learn=learn)
    alone, spread = (made.root / name for name in ("alone", "spread"))
    finish(distil(replace(config, versions=str(alone))))
    finish(distil(replace(config, versions=str(spread), target_shares=shares), processes))
    (one, told), (both, also_told) = learned(made, alone), learned(made, spread)
    assert told and [line["decision"] for line in told] == [line["decision"] for line in also_told]
    assert one.keys() == both.keys()
    # Shares of a layer are added up in another order than the layer adds.
    noise = 0.0 if shares == 1 else LEARN.lr / 300
    for name, value in one.items():
        assert torch.allclose(both[name], value, rtol=0, atol=noise), name
    begun = made.draft.state_dict()
    moved = max(float((one[name] - begun[name]).abs().max()) for name in one)
    assert moved > LEARN.lr, "nothing was learned"


@pytest.mark.long
def test_a_run_in_two_parts_is_the_uninterrupted_one_to_the_bit(loop: Callable[..., Any]) -> None:
    """Weights, their mean, Adam's moments."""
    made = loop("eagle3")
    made.serve(40)
    # One update has so many texts, whenever it begins.
    learn = replace(made.config.learn, steps=3, fresh=8, most_fresh=8, proximal=0.1)
    gate = replace(made.config.gate, every=100)
    config = replace(made.config, until_idle_s=None, learn=learn, gate=gate)
    folders = [made.root / name for name in ("whole", "parts")]
    for folder, ends in zip(folders, ((2,), (1, 2)), strict=True):
        for end in ends:
            finish(distil(replace(config, versions=str(folder), max_updates=end), 2))
    whole, parts = (made.state(folder) for folder in folders)
    assert whole["counters"]["updates"] == parts["counters"]["updates"] == 2
    for name, value in whole["candidate"].items():
        assert torch.equal(value, parts["candidate"][name]), name
    moments, also = (load_file(newest(folder) / "optimizer.safetensors") for folder in folders)
    kinds = {name.rpartition(":")[2] for name in moments}
    assert kinds == {"exp_avg", "exp_avg_sq", "step", "average"}
    assert all(torch.equal(value, also[name]) for name, value in moments.items())
    steps = {int(value) for name, value in moments.items() if name.endswith(":step")}
    assert steps == {2 * learn.steps}


def newest(versions: Path) -> Path:
    return versions / "learner" / f"state-{StateFolder(versions).numbers()[-1]:08d}"


@pytest.mark.long
@pytest.mark.parametrize(
    "killed, steps",
    # While the first one trains it needs none of the others.
    [(0, 6), (1, 6), pytest.param(0, 100_000, id="in a step")],
)
def test_all_end_with_one_that_is_killed_and_a_restart_goes_on(
    loop: Callable[..., Any], killed: int, steps: int
) -> None:
    made = loop("eagle3")
    made.serve(24)
    learn = replace(made.config.learn, steps=6)
    config = replace(made.config, until_idle_s=None, save_s=0.0, max_updates=1, learn=learn)
    finish(distil(config, 2))
    made.serve(40, seed=1)
    run = distil(replace(config, max_updates=None, learn=replace(learn, steps=steps)), 2)
    assert isinstance(run, Ranks)
    states, deadline_s = StateFolder(made.versions), time.monotonic() + 120
    while "goes on after update 1" not in run.processes[0].stdout.read():
        assert time.monotonic() < deadline_s
        time.sleep(0.05)
    # Within a step or at rest, as there are many steps or few.
    time.sleep(4.0)
    saved, begun = made.state(), states.numbers()[-1]
    run.processes[killed].send_signal(signal.SIGKILL)
    made.serve(40, seed=2)  # the first process has texts to read, and meets nobody
    other = run.processes[1 - killed]
    assert other.wait(60) != 0
    said, _ = other.communicate()
    assert f"rank {1 - killed} ends because another process has" in said
    assert "Traceback" not in said
    assert states.numbers()[-1] == begun and made.state()["counters"] == saved["counters"]
    finish(distil(replace(config, until_idle_s=0.3, max_updates=None), 2))
    assert made.status()["updates"] > saved["counters"]["updates"]


def test_what_several_processes_cannot_do_is_refused(
    loop: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    made = loop()
    wrong = [
        (1, {"target_shares": 2}, "'target_shares' is 2 but 1 processes run"),
        (3, {"target_shares": 2}, "'target_shares' is 2 but 3 processes run"),
        (2, {"target_shares": 2, "dtype": "int8"}, "layers are not spread"),
        (
            2,
            {"target_shares": 2, "learn": replace(made.config.learn, teacher="recorded")},
            "no target is loaded that could be shared",
        ),
        (2, {"learn": replace(made.config.learn, teacher="recorded")}, "no pass is made that"),
        (2, {"device": "cuda:1"}, "each process takes a device of its own"),
    ]
    for processes, changes, says in wrong:
        monkeypatch.setenv("WORLD_SIZE", str(processes))
        with pytest.raises(UserError, match=says):
            command.run(replace(made.config, **changes))
    assert not (made.versions / "learner.lock").exists()
