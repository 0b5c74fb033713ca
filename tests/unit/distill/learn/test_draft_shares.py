"""Parts of a draft that several processes train: what is dropped is held by nothing."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.forked import free_port, run

ROOT = Path(__file__).resolve().parents[4]
# A process of its own, since DeepSpeed keeps what it was set up with. The second draft is dropped
# by the first process, the others as the other processes do.
CODE = """
import gc, sys, weakref
from dataclasses import replace
from pathlib import Path
import torch, torch.distributed as dist
from draftsmith.distill.config import DistillConfig, LearnConfig
from draftsmith.distill.learn.spread_optimizer import DraftParts, blank
from draftsmith.drafters import checkpoint
from draftsmith.drafters.options import OPTIONS
from draftsmith.drafters.registry import FAMILIES
from draftsmith.drafters.target.target import Target
folder, zero, draft = sys.argv[1:]
target = Target.load(folder)
dist.init_process_group("gloo")
made = FAMILIES["eagle3"].create(OPTIONS["eagle3"](), target, seed=0)
checkpoint.save(made, Path(draft), target)
learn = LearnConfig(deepspeed=zero)
parts = DraftParts(DistillConfig(target=folder, draft=draft, buffer="b", versions="v", learn=learn))
def storages():
    gc.collect()
    found = [one.untyped_storage() for one in gc.get_objects() if isinstance(one, torch.Tensor)]
    return sum({one.data_ptr(): one.nbytes() for one in found}.values())
sizes = []
for number in range(4):
    leads = number == 1
    optimizer = parts.lead(made, draft, target, None, number) if leads else None
    if not leads:
        parts.open(number, draft, target)
    part = optimizer.part if leads else parts.parts[number]
    part.step(blank(part.drafter, target), lr=0.0)
    held = [weakref.ref(one) for one in (part.drafter, part.engine, part.engine.optimizer)]
    del part, optimizer
    parts.keep(())
    sizes.append(storages())
    print([one() is None for one in held], flush=True)
print(max(sizes[1:]) - sizes[0])
"""


@pytest.mark.parametrize("stage", [2, 3, pytest.param(1, marks=pytest.mark.long)])
def test_an_engine_ends_with_its_version(
    tiny_target: Callable[..., str], tmp_path: Path, stage: int
) -> None:
    environment = os.environ | {
        "DS_ACCELERATOR": "cpu", "CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "1",
        "RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(free_port()),
    }  # fmt: skip
    words = [tiny_target("llama"), ROOT / f"recipes/zero{stage}.json", tmp_path / "draft"]
    done = run([sys.executable, "-c", CODE, *words], capture_output=True, env=environment)
    assert done.returncode == 0, done.stderr
    lines = [
        line for line in done.stdout.splitlines() if line.startswith("[True") or "]" not in line
    ]
    assert lines[-5:-1] == ["[True, True, True]"] * 4, done.stdout
    assert int(lines[-1]) == 0, "bytes of tensors grow with the versions"
