"""The learner over two processes: the same losses and weights as one, and an end for all where one
of them ends."""

from __future__ import annotations

import json
import os
import pickle
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from draftsmith.distill import command as daemon
from draftsmith.distill.config import DistillConfig

SCRIPT = """
import os, pickle, sys
from pathlib import Path
from draftsmith.distill import crew, daemon

rank, add = os.environ["RANK"], crew.add_together

def told(*inputs):
    Path(f"{sys.argv[1]}.rank{rank}").write_text(f"{os.getpid()} ")
    return add(*inputs)

crew.add_together = told
sys.exit(daemon.run(pickle.loads(Path(sys.argv[1]).read_bytes())))
"""


def two_processes(config: DistillConfig, root: Path) -> subprocess.Popen:
    (root / "config").write_bytes(pickle.dumps(config))
    (root / "learn.py").write_text(SCRIPT)
    launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node=2"]
    environment = os.environ | {"OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""}
    return subprocess.Popen(
        [*launcher, str(root / "learn.py"), str(root / "config")],
        env=environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )


@pytest.mark.long
@pytest.mark.timeout(600)
def test_two_processes_learn_as_one(loop: Callable[..., Any], tmp_path: Path) -> None:
    made = loop("eagle3")
    made.serve(24)
    # No candidate is published: what is compared is an update, nothing that hangs on it.
    base = replace(made.config, max_updates=1, gate=replace(made.config.gate, every=1000))
    one, two = (replace(base, versions=str(tmp_path / name)) for name in ("one", "two"))
    assert daemon.run(one) == 0
    process = two_processes(two, tmp_path)
    said, _ = process.communicate(timeout=500)
    assert process.returncode == 0, said
    ours, theirs = made.state(Path(two.versions)), made.state(Path(one.versions))
    fresh = made.draft.state_dict()
    assert ours["counters"]["updates"] == 1
    for name, value in theirs["candidate"].items():
        # Sums over rows in another order: float32 noise, which Adam's division by small moments
        # grows.
        assert torch.allclose(ours["candidate"][name], value, atol=2e-5), name
    assert (
        max(float((value - fresh[name]).abs().max()) for name, value in theirs["candidate"].items())
        > 1e-3
    )
    assert f"{status(two)['loss']:.4f}" == f"{status(one)['loss']:.4f}"


def status(config: DistillConfig) -> dict[str, Any]:
    return json.loads((Path(config.versions) / "status.json").read_text())


@pytest.mark.long
@pytest.mark.timeout(600)
def test_a_killed_process_ends_all(loop: Callable[..., Any], tmp_path: Path) -> None:
    made = loop("eagle3")
    made.serve(24)
    # An update without end, so that the kill comes in one.
    endless = replace(made.config, learn=replace(made.config.learn, steps=100_000))
    process = two_processes(endless, tmp_path)
    follower = tmp_path / "config.rank1"
    while not (follower.is_file() and follower.read_text().endswith(" ")):
        assert process.poll() is None, process.communicate()[0]
        time.sleep(0.1)
    os.kill(int(follower.read_text()), signal.SIGKILL)
    said, _ = process.communicate(timeout=120)
    assert process.returncode != 0
    told = [line for line in said.splitlines() if "because another process has" in line]
    # Tracebacks, if any, are torchrun's.
    assert len(told) == 1 and "draftsmith/distill" not in said, said
