"""`draftsmith plan` for a target in shares: by one process, and by the processes of a launcher."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Callable

import pytest

from draftsmith.cli import main
from draftsmith.drafters.target.taps import body_name, decoder_layers
from draftsmith.drafters.target.target import Target
from draftsmith.train.doctor.memory import num_bytes, parts_of
from tests.forked import Ranks, free_port

OPTIONS = (
    "--families", "eagle3", "--streams", "1", "--k", "2", "--context", "32", "--answers", "100",
    "--alpha", "eagle3:0.7", "--json",
)  # fmt: skip


def plan_of(said: str) -> dict:
    return json.loads(said[said.index("{") :])


@pytest.mark.long
def test_a_launcher_plans_what_one_process_plans(
    tiny_target: Callable[..., str], capsys: pytest.CaptureFixture[str]
) -> None:
    words = ("plan", "--target", tiny_target("llama"), *OPTIONS, "--target-shares", "2")
    assert main(list(words)) == 0
    alone = plan_of(capsys.readouterr().out)
    environment = os.environ | {"OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""}
    command = [sys.executable, "-m", "draftsmith.cli", *words]
    ranks = Ranks(command, 2, free_port(), environment)
    first, other = (one.communicate(240)[0] or "" for one in ranks.processes)
    assert ranks.returncode == 0, first + other
    both = plan_of(first)
    assert "{" not in other
    assert (alone["processes"], both["processes"], both["target_shares"]) == (1, 2, 2)
    (one,), (two,) = alone["drafts"], both["drafts"]
    measured = {"step_s", "train_tokens_per_s", "train_hours"}
    for name, value in one["cost"].items():
        assert name in measured or two["cost"][name] == value, name
    assert two["cost"]["train_hours"] > 0


def test_memory_of_a_share_counts_the_layers_that_are_whole(
    tiny_target: Callable[..., str],
) -> None:
    target = Target.load(tiny_target("llama"))
    whole = num_bytes(target.model)
    body = getattr(target.model, body_name(target.model))
    layers = [num_bytes(one) for one in decoder_layers(body, target.num_layers)]
    parts = parts_of(target.model)
    assert parts.on_device(shares=1) == parts.whole == whole
    two = parts.on_device(shares=2)
    assert two == whole - sum(layers) / 2 + sum(sorted(layers)[-2:])
    assert parts.on_device(shares=4) < two


@pytest.mark.parametrize(
    "count, options, says",
    [(3, ("--target-shares", "2"), "start a multiple of 2"),
     (2, ("--data-curve", "--data", "d", "--out", "o"), "trains in one process")],
)  # fmt: skip
def test_what_processes_cannot_plan_is_refused(
    count: int, options: tuple[str, ...], says: str, monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:  # fmt: skip
    monkeypatch.setenv("WORLD_SIZE", str(count))
    assert main(["plan", "--target", "T", *options]) == 2
    assert says in capsys.readouterr().err
