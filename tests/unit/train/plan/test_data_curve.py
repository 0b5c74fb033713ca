"""Drafts trained on parts of the data."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
import torch

from draftsmith.cli import main
from draftsmith.drafters.target.target import Target
from draftsmith.errors import UserError
from draftsmith.train.evaluate.teacher_forced import DocumentCounts
from draftsmith.train.plan import data_curve
from draftsmith.train.plan.command import check
from draftsmith.train.plan.config import PlanConfig


def config(**changes: object) -> PlanConfig:
    values = {"target": "t", "data": ("d",), "out": "o", "data_curve": True}
    return PlanConfig(**values | changes)


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"data": ()}, "give both"),
        ({"out": None}, "give both"),
        ({"families": ("mtp", "eagle3")}, "one of --families"),
        ({"data_curve": False}, "--out and --recipe are of --data-curve"),
        ({"prompts": 0}, "'prompts' is 0"),
    ],
)
def test_wrong_options_are_one_sentence(changes, said):
    with pytest.raises(UserError, match=said):
        check(config(**changes))


def test_runs_differ_in_their_share_alone(tmp_path: Path):
    recipe = tmp_path / "r.yaml"
    recipe.write_text("steps: 100\nminutes: 3\nbatch_size: 2\neagle3: {norm_output: true}\n")
    asked = config(recipe=str(recipe), epochs=2.0)
    runs = [data_curve.train_config(asked, share) for share in data_curve.SHARES]
    assert [run.share for run in runs] == [0.125, 0.25, 0.5, 1.0]
    assert {(run.steps, run.minutes, run.epochs, run.batch_size) for run in runs} == {
        (None, None, 2.0, 2)
    }
    assert runs[0].eagle3.norm_output and runs[0].family == "eagle3"
    assert len({run.out for run in runs}) == 4
    assert data_curve.train_config(config(families=("mtp",)), 1.0).family == "mtp"


def counts(rounds: list[float]) -> list[DocumentCounts]:
    return [DocumentCounts(f"{at}", 100, 0, [one], [1.0], [1.0]) for at, one in enumerate(rounds)]


def test_what_is_hard_for_every_draft_is_no_error_of_their_difference():
    hard = np.random.default_rng(0).uniform(20, 80, size=40)
    points = data_curve.points_of(
        [1, 2, 4, 8], [counts((hard * scale).tolist()) for scale in (1.0, 0.95, 0.9, 0.88)]
    )
    assert points.values == pytest.approx(4000 / (hard.sum() * np.array([1.0, 0.95, 0.9, 0.88])))
    single = points.covariance[3, 3] ** 0.5
    difference = points.covariance[3, 3] + points.covariance[0, 0] - 2 * points.covariance[0, 3]
    assert difference**0.5 < 0.2 * single


@pytest.mark.long
def test_a_curve_is_trained_said_and_not_trained_again(
    tiny_target, write_data, tmp_path, capsys, monkeypatch
):
    target = Target.load(tiny_target("llama"))
    generator = torch.Generator().manual_seed(0)
    prompts = [torch.randint(3, 288, (5,), generator=generator).tolist() for _ in range(120)]
    answers = target.answer(prompts, max_new_tokens=12, temperature=1.0, batch_size=120)
    rows = [
        {"name": f"{n}", "input_ids": prompt + answer, "loss_mask": [0] * 5 + [1] * len(answer)}
        for n, (prompt, answer) in enumerate(zip(prompts, answers))
    ]
    provenance = {
        "target_revision": target.revision, "temperature": 1.0, "top_k": 0, "top_p": 1.0,
    }  # fmt: skip
    recipe = tmp_path / "r.yaml"
    recipe.write_text(
        "held_out: 0.3\nbatch_size: 4\ndtype: float32\nlog_every: 1\noptim: {lr: 1.0e-2}\n"
    )
    arguments = [
        "plan", "--target", target.name, "--data", str(write_data(rows, provenance=provenance)),
        "--data-curve", "--out", str(tmp_path / "curve"), "--recipe", str(recipe), "--json",
        "--epochs", "2",
    ]  # fmt: skip
    capsys.readouterr()
    assert main(arguments) == 0
    found = json.loads(capsys.readouterr().out)
    tokens = [point["tokens"] for point in found["points"]]
    assert tokens == sorted(tokens) and 6 < tokens[-1] / tokens[0] < 10
    assert all(1 <= point["tau"] <= 5 and point["error"] > 0 for point in found["points"])
    assert "more data" in found["verdict"] and (found["power"] is None) == (not found["expected"])
    # Many more steps on many more texts.
    assert found["points"][-1]["tau"] > found["points"][0]["tau"]
    monkeypatch.setattr(data_curve, "run_training", lambda run: pytest.fail("trained again"))
    assert main(arguments) == 0
    assert json.loads(capsys.readouterr().out) == found
    assert main([word for word in arguments if word != "--json"]) == 0
    assert found["verdict"] in capsys.readouterr().out
