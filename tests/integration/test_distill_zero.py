"""ZeRO-1 and ZeRO-2 in the learner: two processes with half an optimizer each take the steps of one
that has it all."""

from __future__ import annotations

import os
import pickle
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from draftsmith.distill.buffer.buffer import BufferReader
from draftsmith.distill.buffer.traffic import stitch
from draftsmith.distill.learn import zero
from draftsmith.errors import UserError

RECIPES = Path(__file__).parents[2] / "recipes"
SCRIPT = """
import copy, pickle, sys
from pathlib import Path
import torch
from draftsmith.distill.learn.ranks import follow, joined, optimizers
from draftsmith.distill.learn.gradients import OwnGradients
from draftsmith.distill.learn.learner import Learner
from draftsmith.drafters.target.device import load_target
from draftsmith.drafters import checkpoint

config, texts = pickle.loads(Path(sys.argv[1]).read_bytes())

def kept(learner):
    weights = {name: value.detach().clone() for name, value in learner.parameters.items()}
    return learner.steps, weights,
    {name: value.clone() for name, value in learner.moments().items()}

def updated(learner, count):
    broken = sum(learner.update(texts).broken for _ in range(count))
    return broken, *kept(learner)

def main(channel):
    target = load_target(config.target, dtype="auto", device="cpu", trust_remote_code=False)
    parts = optimizers(config, OwnGradients(target, config.learn), channel)
    live = lambda: checkpoint.load(config.draft, target, dtype=torch.float32)
    learner = lambda optimizer: Learner(live(), target, config.learn, seed=0, optimizer=optimizer)
    whole, parted, other = learner(None), learner(parts), learner(parts)
    held, size = parted.optimizer.part.state["exp_avg"].numel(),
    sum(value.numel() for value in parted.parameters.values())
    found = {"held": held / size, "fresh": kept(whole)}
    found |= {"whole": updated(whole, 3), "parted": updated(parted, 3), "other": updated(other, 1)}
    with parted.averaged() as judged:
        found["judged"] = {name: value.clone() for name, value in judged.state_dict().items()}
    # Of an element of the weights that is not finite no gradient is.
    weights = next(iter(parted.parameters.values())).data.view(-1)
    held, weights[0] = weights[0].clone(), torch.inf
    found["broken"] = updated(parted, 1)
    weights[0] = held
    # From a saved state, whatever held it, all go on alike.
    for one in (whole, other):
        one.fill(*copy.deepcopy(found["parted"][1:]))
    for one in (whole, other, parted):
        one.updates, one.reservoir = 3, learner(None).reservoir
    found["went on"] = [updated(one, 1) for one in (whole, other, parted)]
    other.optimizer.close()
    parted.restart(live().state_dict())
    found["restarted"] = kept(parted)
    return found

with joined(torch.device("cpu")) as crew:
    if crew.rank:
        follow(crew.channel, config)
    else:
        torch.save(main(crew.channel), sys.argv[2])
"""


def farthest(ours: dict[str, torch.Tensor], theirs: dict[str, torch.Tensor]) -> float:
    assert ours.keys() == theirs.keys()
    return max(float((value - theirs[name]).abs().max()) for name, value in ours.items())


@pytest.mark.long
@pytest.mark.timeout(600)
@pytest.mark.parametrize("stage", [1, 2], ids="zero{}".format)
def test_parts_take_the_steps_of_the_whole(
    loop: Callable[..., Any], tmp_path: Path, stage: int
) -> None:
    made = loop("eagle3")
    made.serve(12)
    records = BufferReader(made.config.buffer).read(max_records=10**6).records
    names = dict.fromkeys(one.request for one in records)
    texts = [stitch([one for one in records if one.request == name]).slim() for name in names]
    learn = replace(made.config.learn, steps=2, proximal=1.0)
    config = replace(made.config, learn=learn, deepspeed=str(RECIPES / f"zero{stage}.json"))
    found = run(tmp_path, (config, texts))
    assert found["held"] <= 0.51
    broken, steps, weights, moments = found["parted"]
    assert (broken, steps) == (0, 6) == found["whole"][:2]
    assert (
        farthest(weights, found["whole"][2]) < 1e-6 and farthest(moments, found["whole"][3]) < 1e-6
    )
    assert farthest(weights, found["fresh"][1]) > 1e-3
    # What is judged is the mean, which is saved with the moments.
    assert all(torch.equal(found["judged"][name], moments[f"{name}:average"]) for name in weights)
    assert farthest(weights, found["judged"]) > 1e-4
    # Another candidate has moments of its own.
    assert found["other"][1] == 2 and farthest(moments, found["other"][3]) > 1e-3
    assert found["broken"][:2] == (2, 6) and farthest(moments, found["broken"][3]) == 0
    for _, steps, gone_on, _ in found["went on"]:
        assert steps == 8 and farthest(gone_on, found["went on"][0][2]) < 1e-6 < 1e-4 < farthest(
            gone_on, weights
        )
    assert (
        found["restarted"][0] == 0
        and not found["restarted"][2]
        and farthest(found["restarted"][1], found["fresh"][1]) == 0
    )


def test_what_zero_cannot_do_here_is_one_sentence(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(UserError, match="ZeRO stage 3, but rank 0"):
        zero.check(str(RECIPES / "zero3.json"))
    monkeypatch.delenv("WORLD_SIZE", raising=False)
    with pytest.raises(UserError, match="torchrun"):
        zero.check(str(RECIPES / "zero2.json"))


def run(root: Path, given: Any) -> dict[str, Any]:
    (root / "given").write_bytes(pickle.dumps(given))
    (root / "learn.py").write_text(SCRIPT)
    launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node=2"]
    environment = os.environ | {"OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""}
    command = [*launcher, str(root / "learn.py"), str(root / "given"), str(root / "found")]
    done = subprocess.run(
        command,
        env=environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stdout
    return torch.load(root / "found")
