"""Commands that are killed on their way and started again end with the bits of a run that nothing
stopped: training and answering by several processes, and learning from recorded distributions."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch

from draftsmith.config import to_dict
from draftsmith.distill.state import StateFolder
from draftsmith.drafters.target.target import Target
from draftsmith.files import write_json
from tests.forked import Forked, Ranks, free_port

CLOCK = {"elapsed_s", "time_s", "share"}
ROOT = Path(__file__).parents[2]


def start(*words: object, processes: int = 1) -> Forked | Ranks:
    """`draftsmith WORDS`; one thread, so that equal runs are equal to the bit."""
    command = [sys.executable, "-m", "draftsmith.cli", *map(str, words)]
    environment = os.environ | {
        "OMP_NUM_THREADS": "1", "DS_ACCELERATOR": "cpu", "CUDA_VISIBLE_DEVICES": "",
    }  # fmt: skip
    if processes > 1:
        return Ranks(command, processes, free_port(), environment)
    return Forked(command, env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT)


def finish(run: Forked | Ranks) -> None:
    said, _ = run.communicate(timeout=240)
    assert run.returncode == 0, said


def kill(run: Forked | Ranks, when: Callable[[], bool], done: Callable[[], bool]) -> None:
    """Kills all processes as soon as `when`; `done` is true of a whole run."""
    processes = run.processes if isinstance(run, Ranks) else [run]
    deadline_s = time.monotonic() + 120
    while not when():
        assert all(one.poll() is None for one in processes), run.communicate(timeout=30)[0]
        assert time.monotonic() < deadline_s
        time.sleep(0.001)
    for one in processes:
        one.send_signal(signal.SIGKILL)
    for one in processes:
        assert one.wait(60) != 0
    assert not done(), "the kill came too late to show anything"


def lines(path: Path) -> list[dict[str, Any]]:
    """Lines of a log, without what they say of the clock."""
    found = [json.loads(line) for line in path.read_text().splitlines()]
    return [{key: one[key] for key in one if key not in CLOCK} for one in found]


@pytest.fixture(scope="module")
def data(target: Target, tmp_path_factory: pytest.TempPathFactory) -> Path:
    generator = torch.Generator().manual_seed(0)
    prompts = [torch.randint(3, 288, (5,), generator=generator).tolist() for _ in range(64)]
    answers = target.answer(prompts, max_new_tokens=12, temperature=1.0, batch_size=64)
    rows = [
        {"name": f"{at}", "input_ids": [*asked, *answer],
         "loss_mask": [0] * len(asked) + [1] * len(answer)}
        for at, (asked, answer) in enumerate(zip(prompts, answers))
    ]  # fmt: skip
    folder = tmp_path_factory.mktemp("killed-data")
    pq.write_table(pa.Table.from_pylist(rows), folder / "part-00000.parquet")
    write_json(
        folder / "provenance.json",
        {"target_revision": target.revision, "temperature": 1.0, "top_k": 0, "top_p": 1.0},
    )
    return folder


def same_draft(one: Path, other: Path) -> None:
    assert lines(one / "metrics.jsonl") == lines(other / "metrics.jsonl")
    assert (one / "model.safetensors").read_bytes() == (other / "model.safetensors").read_bytes()


@pytest.mark.long
@pytest.mark.parametrize("stage", [None, pytest.param("zero2", marks=pytest.mark.long)])
def test_two_processes_train_on(
    stage: str | None, target: Target, data: Path, tmp_path: Path
) -> None:
    words = (
        "train", "eagle3", "--target", target.name, "--data", data, "--dtype", "float32",
        "--steps", 24, "--log-every", 2, "--save-every", 4, "--eval-tokens", 8, "--batch-size", 4,
        "optim.lr=3e-3", *(("--deepspeed", ROOT / f"recipes/{stage}.json") if stage else ()),
        "--out",
    )  # fmt: skip
    whole, killed = tmp_path / "whole", tmp_path / "killed"
    finish(start(*words, whole, processes=2))
    mark = killed / "training/checkpoint-8/complete.json"
    kill(start(*words, killed, processes=2), mark.exists, (killed / "draftsmith.json").exists)
    finish(start(*words, killed, processes=2))
    same_draft(whole, killed)


@pytest.mark.long
def test_two_processes_answer_on(target: Target, tmp_path: Path) -> None:
    words = (
        "generate", "--target", target.name, "--prompts", "stdlib:prose", "--count", 46,
        "--prompt-tokens", 12, "--max-tokens", 16, "--batch", 4, "--shard", 12, "--seed", 5,
        "--store-taps", "bf16", "--out",
    )  # fmt: skip
    whole, killed = tmp_path / "whole", tmp_path / "killed"
    finish(start(*words, whole))

    def is_whole() -> bool:
        return json.loads((killed / "provenance.json").read_text())["complete"]

    # in the middle of a shard
    run = start(*words, killed, processes=2)
    kill(run, lambda: any(killed.glob(".batch-*.parquet")), is_whole)
    assert 0 < sum(pq.read_metadata(one).num_rows for one in killed.glob("*.parquet")) < 46
    finish(start(*words, killed, processes=2))
    names = sorted(one.name for one in whole.iterdir())
    assert sorted(one.name for one in killed.iterdir()) == names
    for name in names:
        assert (whole / name).read_bytes() == (killed / name).read_bytes(), name


@pytest.mark.long
def test_a_learner_of_recorded_distributions_learns_on(
    loop: Callable[..., Any], tmp_path: Path
) -> None:
    made = loop("draft-lm")
    for seed in range(6):  # a shard each, of which an update is made
        made.serve(10, seed=seed)
    learn = replace(made.config.learn, teacher="recorded", steps=8, fresh=4, most_fresh=8)
    config = replace(
        made.config, learn=learn, save_s=0.0, gate=replace(made.config.gate, requests=2)
    )

    def distil(versions: Path) -> Forked | Ranks:
        path = versions.with_suffix(".json")
        path.write_text(json.dumps(to_dict(replace(config, versions=str(versions)))))
        return start("distill", "--config", path)

    whole, killed = tmp_path / "whole", tmp_path / "killed"
    finish(distil(whole))
    updates = made.state(whole)["counters"]["updates"]
    assert updates >= 4, updates

    def saves(versions: Path) -> int:
        return max(StateFolder(versions).numbers(), default=0)

    assert saves(whole) > 3
    kill(distil(killed), lambda: saves(killed) >= 2, lambda: saves(killed) >= saves(whole))
    finish(distil(killed))
    (one, told), (other, also_told) = (
        (made.state(versions), lines(versions / "decisions.jsonl")) for versions in (whole, killed)
    )
    assert told and told == also_told
    assert one["counters"] == other["counters"]
    begun = made.draft.state_dict()
    for name, weights in one["candidate"].items():
        assert torch.equal(weights, other["candidate"][name]), name
    assert any(not torch.equal(one["candidate"][name], begun[name]) for name in one["candidate"])
