"""A learner whose target and draft are run by several processes learns what one process learns."""

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
from draftsmith.drafters.options import LoraOptions
from draftsmith.errors import UserError
from tests.forked import Forked, Ranks, free_port
from tests.integration.conftest import LEARN

ROOT = Path(__file__).resolve().parents[2]
# Tokens of a text whose states are recorded, where the learner of this teacher reads them.
RECORDED = {"live": 0, "recorded": 1024}
# The order of sums shows in bfloat16.
EXACT = replace(LEARN, dtype="float32")
ENVIRONMENT = {"OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": "", "DS_ACCELERATOR": "cpu"}


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


def same_weights(ours: dict[str, torch.Tensor], theirs: dict[str, torch.Tensor]) -> None:
    """Sums over rows in another order are float32 noise of 1e-7, which Adam's division by small
    moments grows: within 1e-5."""
    assert ours.keys() == theirs.keys()
    for name, value in ours.items():
        assert torch.allclose(value, theirs[name], rtol=0, atol=LEARN.lr / 300), name


@pytest.mark.long
@pytest.mark.parametrize(
    "teacher, processes, shares, stage, rows",
    [
        ("live", 2, 2, None, 5),
        ("live", 2, 1, 2, 1),  # a process without a row
        ("recorded", 2, 1, None, 5),
        *(
            pytest.param(*case, marks=pytest.mark.long)
            for case in [
                ("live", 2, 1, None, 1), ("live", 2, 1, 1, 8), ("live", 2, 1, 3, 1),
                ("live", 2, 2, 3, 8), ("live", 4, 2, None, 8), ("recorded", 2, 1, 2, 1),
                ("recorded", 2, 1, 3, 8),
            ]
        ),
    ],
)  # fmt: skip
def test_several_processes_learn_what_one_learns(
    loop: Callable[..., Any],
    teacher: str,
    processes: int,
    shares: int,
    stage: int | None,
    rows: int,
) -> None:
    made = loop("eagle3")
    made.serve(24, record_taps=RECORDED[teacher])
    gate = replace(made.config.gate, requests=2)
    learn = replace(EXACT, teacher=teacher, steps=6, batch=rows, proximal=10.0)
    config = replace(made.config, gate=gate, learn=learn)
    alone, spread = (made.root / name for name in ("alone", "spread"))
    finish(distil(replace(config, versions=str(alone))))
    several = replace(
        config,
        versions=str(spread),
        target_shares=shares,
        learn=replace(
            learn,
            deepspeed=stage and str(ROOT / f"recipes/zero{stage}.json"),
            # What is computed again is the same, also of weights that were put away in between.
            gradient_checkpointing=stage is not None,
        ),
    )
    finish(distil(several, processes))
    (one, told), (both, also_told) = learned(made, alone), learned(made, spread)
    assert told and [line["decision"] for line in told] == [line["decision"] for line in also_told]
    same_weights(both, one)
    begun = made.draft.state_dict()
    moved = max(float((one[name] - begun[name]).abs().max()) for name in one)
    assert moved > LEARN.lr, "nothing was learned"


@pytest.mark.long
@pytest.mark.parametrize(
    "stage", [None, *(pytest.param(stage, marks=pytest.mark.long) for stage in (2, 3))]
)
def test_heads_that_no_step_reaches_stay_as_they_are(
    loop: Callable[..., Any], stage: int | None
) -> None:
    made = loop("medusa")
    made.serve(24)
    unroll = replace(LEARN.unroll, steps=1)
    # A decay that would be seen in a head without a gradient.
    learn = replace(EXACT, steps=4, unroll=unroll, weight_decay=1.0)
    zero = stage and str(ROOT / f"recipes/zero{stage}.json")
    alone, spread = (made.root / name for name in ("alone", "spread"))
    finish(distil(replace(made.config, versions=str(alone), learn=learn)))
    several = replace(made.config, versions=str(spread), learn=replace(learn, deepspeed=zero))
    finish(distil(several, 2))
    weights, begun = learned(made, spread)[0], made.draft.state_dict()
    same_weights(weights, learned(made, alone)[0])
    kept = {name for name in weights if torch.equal(weights[name], begun[name])}
    assert kept and kept != weights.keys()


@pytest.mark.long
@pytest.mark.parametrize("stage", [None, 3])
def test_adapters_are_trained_by_several_processes_too(
    loop: Callable[..., Any], stage: int | None
) -> None:
    made = loop("draft-lm")
    made.serve(24)
    learn = replace(EXACT, steps=4, lora=LoraOptions(rank=2))
    zero = stage and str(ROOT / f"recipes/zero{stage}.json")
    alone, spread = (made.root / name for name in ("alone", "spread"))
    finish(distil(replace(made.config, versions=str(alone), learn=learn)))
    several = replace(made.config, versions=str(spread), learn=replace(learn, deepspeed=zero))
    finish(distil(several, 2))
    weights = learned(made, spread)[0]
    assert all(".lora_" in name for name in weights)
    same_weights(weights, learned(made, alone)[0])


@pytest.mark.long
@pytest.mark.parametrize(
    "teacher, stage",
    [
        ("live", 2),
        ("recorded", None),
        *(
            pytest.param(*case, marks=pytest.mark.long)
            for case in [("live", None), ("live", 1), ("live", 3), ("recorded", 2)]
        ),
    ],
)
def test_a_run_in_two_parts_is_the_uninterrupted_one_to_the_bit(
    loop: Callable[..., Any], teacher: str, stage: int | None
) -> None:
    """Weights, their mean, Adam's moments: of what several processes hold, all is in the state."""
    made = loop("eagle3")
    made.serve(40, record_taps=RECORDED[teacher])
    zero = stage and str(ROOT / f"recipes/zero{stage}.json")
    # One update has so many texts, whenever it begins.
    learn = replace(
        made.config.learn, teacher=teacher, steps=3, fresh=8, most_fresh=8, proximal=0.1,
        deepspeed=zero,
    )  # fmt: skip
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
@pytest.mark.parametrize("steps", [6, 100_000], ids=["between updates", "in a step"])
@pytest.mark.parametrize("killed", [0, 1])
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
    empty = made.root / "zero0.json"
    empty.write_text('{"zero_optimization": {"stage": 0}}', encoding="utf-8")
    wrong = [
        (1, {"target_shares": 2}, "'target_shares' is 2 but 1 processes run"),
        (3, {"target_shares": 2}, "'target_shares' is 2 but 3 processes run"),
        (2, {"target_shares": 2, "dtype": "int8"}, "layers are not spread"),
        (
            2,
            {"target_shares": 2, "learn": replace(made.config.learn, teacher="recorded")},
            "no target is loaded that could be shared",
        ),
        (1, {"learn": replace(made.config.learn, deepspeed="z.json")}, "but one process runs"),
        (2, {"learn": replace(made.config.learn, deepspeed=str(empty))}, "'stage' is none of"),
        (2, {"device": "cuda:1"}, "each process takes a device of its own"),
    ]
    for processes, changes, says in wrong:
        monkeypatch.setenv("WORLD_SIZE", str(processes))
        with pytest.raises(UserError, match=says):
            command.run(replace(made.config, **changes))
    assert not (made.versions / "learner.lock").exists()
