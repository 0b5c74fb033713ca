"""`draftsmith plan` for a target whose layers are read for every pass."""

from __future__ import annotations

import json
from collections.abc import Callable

import pytest
import torch

from draftsmith.cli import main
from draftsmith.drafters.options import OPTIONS
from draftsmith.drafters.target.target import Target
from draftsmith.train.doctor.memory import parts_of
from draftsmith.train.plan import report, timing

FAMILIES = ("eagle3", "draft-lm", "medusa")


@pytest.fixture
def fast(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(timing, "TURN_S", 0.0)


@pytest.mark.long
def test_memory_and_steps_are_those_of_an_offloaded_target(
    tiny_target: Callable[..., str], fast: None, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = tiny_target("llama")
    parts = parts_of(Target.load(folder, dtype=torch.float32).model)
    words = ["plan", "--target", folder, "--families", *FAMILIES, "--alpha", "eagle3:0.7"]
    capsys.readouterr()
    assert main([*words, "--target-offload", "disk", "--json"]) == 0
    said = capsys.readouterr().out  # a library may log as the test imports it
    plan = json.loads(said[said.index("{") :])
    assert plan["target_offload"] == "disk" and plan["too_large"] == []
    found = plan["offloaded"]
    assert found["device_bytes"] == parts.beside + max(parts.layers)
    assert found["layers_bytes"] == sum(parts.layers) and found["read_s"] > 0
    assert plan["target"]["bytes"] == parts.whole
    assert set(plan["recommended"].values()) == {None}
    # No layer is here to start from, and rounds are not run.
    assert [draft["family"] for draft in plan["drafts"]] == ["eagle3", "draft-lm", "medusa"]
    for draft in plan["drafts"]:
        cost = draft["cost"]
        assert draft["streams"] == {}
        assert cost["train_memory_bytes"] == found["device_bytes"] + 16 * cost["parameters"]
        assert cost["serve_memory_bytes"] > parts.whole
        rate = found["step_tokens"] / cost["step_s"]
        assert cost["train_tokens_per_s"] == pytest.approx(rate) and cost["step_s"] > 0


@pytest.mark.long
def test_a_plan_says_what_reading_costs_and_what_makes_drafts_fit(
    tiny_target: Callable[..., str],
    fast: None,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    words = ["plan", "--target", tiny_target("llama"), "--families", "eagle3", "--context", "16"]
    assert main([*words, "--target-offload", "disk"]) == 0
    said = capsys.readouterr().out
    assert "step s" in said and "of which reading the target takes" in said
    assert "MiB in its files" in said and "plan without --target-offload where it fits" in said
    assert "takes more than" not in said
    monkeypatch.setattr(report, "available_bytes", lambda _: 1)
    for options in ([], ["--target-offload", "disk"]):
        assert main([*words, "--streams", "1", "--k", "1", *options]) == 0
        (said,) = [one for one in capsys.readouterr().out.split("\n\n") if "takes more" in one]
        assert said.startswith("training eagle3 takes more than the 0.0 MiB of this cpu; give ")
        assert ("--target-offload" in said) is (options == [])


@pytest.mark.parametrize(
    ("options", "says"),
    [
        (["--target-shares", "2"], "'target_offload' is 'disk' and 'target_shares' 2"),
        (["--data-curve", "--data", "D", "--out", "O"], "--data-curve decodes"),
        (["draft_lm.target_layers=[0]"], "copies layers of a target whose weights are here"),
    ],
)
def test_what_is_not_planned_offloaded_is_refused(
    options: list[str], says: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert "draft-lm" in OPTIONS
    assert main(["plan", "--target", "T", *options, "--target-offload", "disk"]) == 2
    assert says in capsys.readouterr().err
