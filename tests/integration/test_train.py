"""`draftsmith train` as a user runs it: processes, kills, ranks, bad input."""

from __future__ import annotations

import errno
import json
import shlex
import signal
import subprocess
import time
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from random import Random
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from draftsmith.drafters.target.sharded import FAILED
from draftsmith.errors import UserError
from draftsmith.train.checkpoints import Checkpoint, RunFolder
from draftsmith.train.command import run
from draftsmith.train.config import OptimConfig, TrainConfig
from tests.forked import Forked, Ranks, cli, finish, one_thread, torchrun
from tests.waiting import wait_until

ROOT = Path(__file__).parents[2]
Process = subprocess.Popen | Forked | Ranks
# What a line of metrics says about the clock, not about the training.
CLOCK = {"elapsed_s"}


@pytest.fixture
def train(target_folder: str, data: Path, tmp_path: Path) -> Callable[..., Process]:
    """Starts `draftsmith train` into `tmp_path / name`; one thread and float32, so that equal runs
    are equal to the bit.

    `started` processes are a user's, with torchrun where they are several; the others are forked
    from one that has imported already.
    """

    def start(
        name: str, *options: str, family: str = "eagle3", processes: int = 1, started: bool = False
    ) -> Process:
        command = cli("train", family, "--target", target_folder, "--data", data)
        command += ["--out", str(tmp_path / name), "--dtype", "float32", *options]
        if processes == 1 and "--deepspeed" not in options:
            streams: Any = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT}
            return Forked(command, env=one_thread(), **streams)
        if not started:
            return Ranks(command, processes, DS_ACCELERATOR="cpu")
        return subprocess.Popen(
            torchrun(processes, *command[1:]),
            env=one_thread(),
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )

    return start


def config(target_folder: str, data: Path, out: Path, **changes: object) -> TrainConfig:
    values = {"target": target_folder, "data": (str(data),), "out": str(out), "dtype": "float32"}
    return TrainConfig(**{"family": "eagle3"} | values | changes)


def metrics(folder: Path) -> list[dict]:
    lines = (folder / "metrics.jsonl").read_text().splitlines()
    return [{k: v for k, v in json.loads(line).items() if k not in CLOCK} for line in lines]


SHORT = {
    "eval_prompts": 0, "steps": 8, "log_every": 1, "batch_size": 4,
    "optim": OptimConfig(schedule="constant", warmup=0.0),
}  # fmt: skip
SHORT_FLAGS = shlex.split(
    "--eval-prompts 0 --log-every 1 --batch-size 4 optim.schedule=constant optim.warmup=0"
)


def in_a_save(training: Path) -> bool:
    """A checkpoint is there and not yet whole."""
    return any(not (path / "complete.json").exists() for path in training.glob("checkpoint-*"))


@pytest.mark.long
@pytest.mark.timeout(900)
def test_kills_at_any_moment_cost_at_most_one_save_interval(train, tmp_path):
    interval, chance = 10, Random(0)
    options = ("--steps", "80", "--log-every", "5", "--save-every", f"{interval}", "--eval-prompts", "2", "--eval-tokens", "8",
               "--eval-every", "15", "optim.lr=3e-3")  # fmt: skip
    finish(train("whole", *options))
    folder = RunFolder(tmp_path / "killed")
    for moment in ("in a save", "any", "in a save"):
        before = folder.newest()
        killed = train("killed", *options)
        wait = partial(wait_until, process=killed, said=killed.stdout.read)
        wait(partial(goes_on, folder, before))
        if moment == "any":
            time.sleep(chance.uniform(0.0, 0.4))
        else:
            wait(partial(in_a_save, folder.training), pause_s=0.0)
        killed.send_signal(signal.SIGKILL)
        killed.wait()
        assert not (folder.out / "draftsmith.json").exists(), "the kill came too late"
        lines = folder.metrics.read_text().splitlines()
        reached = max(json.loads(line)["step"] for line in lines if line.endswith("}"))
        assert reached - folder.newest().step <= interval
    with open(folder.metrics, "a") as handle:  # as a kill in the middle of a line leaves it
        handle.write('{"step": 50, "lo')
    finish(train("killed", *options))
    assert metrics(tmp_path / "killed") == metrics(tmp_path / "whole")
    for name in ("model.safetensors", "training/best.json"):
        assert (folder.out / name).read_bytes() == (tmp_path / "whole" / name).read_bytes()


def goes_on(folder: RunFolder, before: Checkpoint | None) -> bool:
    newest = folder.newest()
    return newest is not None and newest != before


def test_a_full_disk_costs_the_checkpoint_being_written(target_folder, data, tmp_path, monkeypatch):
    settings = config(
        target_folder, data, tmp_path / "full", **SHORT | {"save_every": 1, "steps": 4}
    )
    whole = replace(settings, out=str(tmp_path / "whole"))
    run(whole)
    honest = torch.save

    def full(value: object, path: object, *rest: object, **options: object) -> None:
        if "checkpoint-3" in str(path):
            Path(str(path)).write_bytes(b"half")
            raise OSError(errno.ENOSPC, "No space left on device")
        honest(value, path, *rest, **options)

    monkeypatch.setattr(torch, "save", full)
    says = r"checkpoint of step 3 cannot be written .*No space left.*; make room in"
    with pytest.raises(UserError, match=says):
        run(settings)
    assert RunFolder(settings.out).newest().step == 2
    monkeypatch.setattr(torch, "save", honest)
    run(settings)
    assert metrics(tmp_path / "full") == metrics(tmp_path / "whole")


@pytest.fixture(scope="session")
def one_process(
    tmp_path_factory: pytest.TempPathFactory, target_folder: str, data: Path
) -> list[dict]:
    """What two ranks with one pass a step must reproduce: one rank with two, which sees the same
    batches."""
    out = tmp_path_factory.mktemp("one")
    run(config(target_folder, data, out, accumulate=2, **SHORT))
    return metrics(out)


def same_run(ranks: list[dict], one_process: list[dict]) -> None:
    assert [line["step"] for line in ranks] == [line["step"] for line in one_process]
    for ours, theirs in zip(ranks, one_process):
        for name in ("loss", "forward_kl_1", "alpha_1", "grad_norm"):
            # Sums over ranks in another order: float32 noise of 1e-7, which Adam's division by
            # small moments grows.
            assert ours[name] == pytest.approx(theirs[name], rel=1e-5), (ours["step"], name)


@pytest.mark.long
@pytest.mark.parametrize("stage", [1, 2, 3])
def test_zero_on_two_processes_equals_one(stage, train, tmp_path, one_process):
    recipe = str(ROOT / f"recipes/zero{stage}.json")
    finish(train("ranks", *SHORT_FLAGS, "--steps", "8", "--deepspeed", recipe, processes=2))
    same_run(metrics(tmp_path / "ranks"), one_process)
    # The saved draft is whole, whatever was partitioned.
    state = load_file(tmp_path / "ranks/model.safetensors")
    assert all(one.numel() > 0 and one.float().isfinite().all() for one in state.values())


@pytest.mark.long
def test_bfloat16_arithmetic_follows_float32_on_two_processes_too(
    target_folder, data, train, tmp_path, one_process
):
    """bfloat16 has 8 bits: the losses of the first steps are near those of float32, and not theirs.
    DeepSpeed keeps the model in bfloat16 beside its own float32 weights, and so it is saved."""
    short = SHORT | {"dtype": "bfloat16", "accumulate": 2}
    run(config(target_folder, data, tmp_path / "one", **short))
    recipe = str(ROOT / "recipes/zero2.json")
    words = ("--steps", "8", "--dtype", "bfloat16", "--deepspeed", recipe)
    finish(train("two", *SHORT_FLAGS, *words, processes=2))
    for name, dtype in (("one", torch.float32), ("two", torch.bfloat16)):
        assert load_file(tmp_path / name / "model.safetensors")["fc.weight"].dtype == dtype
        for ours, theirs in zip(metrics(tmp_path / name), one_process, strict=True):
            assert ours["loss"] == pytest.approx(theirs["loss"], rel=0.02), (name, ours["step"])
            assert ours["loss"] != theirs["loss"]


def test_another_step_is_another_loss(one_process):
    """Negative control of `same_run`: neighbouring steps differ by far more than its tolerance."""
    others = one_process[1:] + one_process[:1]
    moved = [line | {"loss": other["loss"]} for line, other in zip(one_process, others)]
    with pytest.raises(AssertionError):
        same_run(moved, one_process)


@pytest.mark.long
@pytest.mark.parametrize(
    ("family", "recipe"), [("eagle3", None), ("mtp", "zero2"), ("draft-lm", "zero3")]
)
def test_a_target_spread_over_two_processes_trains_alike(
    family, recipe, train, tmp_path, target_folder, data
):
    options = () if family != "draft-lm" else ("draft.target_layers=[0,3]",)
    flags = (*SHORT_FLAGS, "--steps", "4", "--eval-tokens", "8", *options)
    finish(train("one", *flags, "--accumulate", "2", "--eval-prompts", "4", family=family))
    sharding = () if recipe is None else ("--deepspeed", str(ROOT / f"recipes/{recipe}.json"))
    spread = (*flags, "--target-shares", "2", *sharding)
    finish(train("spread", *spread, family=family, processes=2))
    *steps, evaluation = metrics(tmp_path / "one")
    assert evaluation["eval_tau"] >= 1 and evaluation["step"] == 4
    same_run(metrics(tmp_path / "spread"), steps)


@pytest.mark.long
@pytest.mark.parametrize("recipe", [None, "zero2"])
@pytest.mark.parametrize("killed", [0, 1])
def test_all_end_with_one_that_is_killed(killed, recipe, train, tmp_path):
    sharding = () if recipe is None else ("--deepspeed", str(ROOT / f"recipes/{recipe}.json"))
    run = train("killed", *SHORT_FLAGS, "--steps", "100000", *sharding, processes=2)
    assert isinstance(run, Ranks)
    lines = tmp_path / "killed/metrics.jsonl"
    wait_until(lambda: lines.exists() and lines.stat().st_size)
    run.processes[killed].send_signal(signal.SIGKILL)
    other = run.processes[1 - killed]
    assert other.wait(60) == FAILED
    said, _ = other.communicate()
    assert f"draftsmith: error: rank {1 - killed} ends because another process has (" in said
    assert "Traceback" not in said


@pytest.mark.long
@pytest.mark.timeout(900)
@pytest.mark.parametrize("stage", [1, 2, 3])
def test_a_deepspeed_run_goes_on(stage, train, tmp_path, one_process):
    recipe = str(ROOT / f"recipes/zero{stage}.json")
    for steps in (4, 8):
        options = (*SHORT_FLAGS, "--steps", str(steps), "--deepspeed", recipe)
        finish(train("resumed", *options, processes=2))
    same_run(metrics(tmp_path / "resumed"), one_process)


@pytest.mark.long
@pytest.mark.parametrize("counts", [(1, 2), (2, 1)], ids=str)
def test_a_run_goes_on_with_another_number_of_processes(
    counts, train, tmp_path, one_process, target_folder, data
):
    """Two batches an optimizer step throughout: of two ranks, or of one that accumulates."""
    for steps, processes in zip((4, 8), counts):
        if processes == 2:
            started = counts == (1, 2)  # by torchrun, once
            flags = (*SHORT_FLAGS, "--steps", f"{steps}")
            finish(train("moved", *flags, processes=2, started=started))
        else:
            short = SHORT | {"steps": steps, "accumulate": 2}
            run(config(target_folder, data, tmp_path / "moved", **short))
    same_run(metrics(tmp_path / "moved"), one_process)


def test_another_size_of_optimizer_steps_is_refused_with_the_mend(
    target_folder, data, tmp_path, monkeypatch
):
    out = tmp_path / "out"
    run(config(target_folder, data, out, accumulate=2, **SHORT | {"steps": 1}))
    says = r"2 batches an optimizer step, and 1 x accumulate 3 are 3; give --accumulate 2"
    with pytest.raises(UserError, match=says):
        run(config(target_folder, data, out, accumulate=3, **SHORT))
    monkeypatch.setenv("WORLD_SIZE", "2")
    with pytest.raises(UserError, match=r"2 x accumulate 2 are 4; give --accumulate 1"):
        run(config(target_folder, data, out, accumulate=2, **SHORT))
    monkeypatch.setenv("WORLD_SIZE", "3")
    with pytest.raises(UserError, match=r"start a number of processes that divides 2"):
        run(config(target_folder, data, out, **SHORT))
