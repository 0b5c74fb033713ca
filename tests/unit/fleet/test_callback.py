"""A trainer's events in TRL's order: revisions where a learner follows them, and names of the
weights before their first rollout."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import httpx
import pytest
import torch
from safetensors.torch import save_file
from transformers import AutoModelForCausalLM, AutoTokenizer, TrainerControl, TrainerState
from transformers.trainer_callback import CallbackHandler

from draftsmith.distill.learn.text_states import TargetFolder
from draftsmith.drafters.target.target import Target
from draftsmith.errors import UserError
from draftsmith.fleet.rl import FollowPolicy, PolicyRevisions, is_sharded, name_weights

ARGS = SimpleNamespace(temperature=1.0, top_p=1.0, top_k=0, min_p=None)


class Trainer:
    """Stand-in for TRL's: rollouts, then an optimizer step, with transformers' own events."""

    def __init__(self, folder: str, callback: FollowPolicy, *, step: int = 0):
        self.model = AutoModelForCausalLM.from_pretrained(folder)
        self.tokenizer = AutoTokenizer.from_pretrained(folder)
        self.state = TrainerState(global_step=step, is_world_process_zero=True)
        self.events = CallbackHandler([callback], self.model, self.tokenizer, None, None)

    def train(self, steps: int, rollout: Callable[[int], object] = lambda step: None) -> None:
        event = (ARGS, self.state, TrainerControl())
        self.events.call_event("on_train_begin", *event)
        for _ in range(steps):
            self.events.call_event("on_step_begin", *event)
            rollout(self.state.global_step)
            with torch.no_grad():
                for parameter in self.model.parameters():
                    parameter.add_(0.01)
            self.state.global_step += 1
            self.events.call_event("on_step_end", *event)
        self.events.call_event("on_train_end", *event)


class Http:
    """A server with the routes of vLLM's development mode, or without."""

    def __init__(self, status: int = 200):
        self.status, self.calls = status, list[tuple[str, dict[str, Any]]]()

    def post(self, url: str, *, json: dict[str, Any], timeout: float) -> Any:
        self.calls.append((url, json))
        return SimpleNamespace(status_code=self.status, text="none")


def steps(root: Path) -> list[str]:
    return sorted(path.name for path in root.iterdir())


def test_revisions_are_written_where_a_learner_follows_them(
    tmp_path: Path, tiny_target: Callable[..., str]
) -> None:
    root, seen = tmp_path / "policy", []
    trainer = Trainer(tiny_target("llama"), FollowPolicy(root, every=2, keep=2))

    def look(step: int) -> None:
        source = TargetFolder(str(root / "current"))
        seen.append((step, Path(source.folder).name, source.weight_version))

    trainer.train(5, look)
    assert seen == [
        (0, "step-000000", "0"), (1, "step-000000", "0"), (2, "step-000002", "2"),
        (3, "step-000002", "2"), (4, "step-000004", "4"),
    ]  # fmt: skip
    assert steps(root) == ["current", "step-000004", "step-000005"]
    target = Target.load(TargetFolder(str(root / "current")).folder)
    for name, value in trainer.model.state_dict().items():
        assert torch.equal(value, target.model.state_dict()[name])
    # A training that is resumed from a checkpoint counts from there.
    Trainer(tiny_target("llama"), FollowPolicy(root, keep=2), step=3).train(1)
    assert steps(root) == ["current", "step-000003", "step-000004"]


def test_a_revision_is_there_whole_or_not_at_all(tmp_path: Path) -> None:
    def save(folder: Path) -> None:
        (folder / "model.safetensors").write_text("weights")

    def fail(folder: Path) -> None:
        save(folder)
        raise OSError("no space left on device")

    revisions = PolicyRevisions(tmp_path)
    revisions.write(0, save)
    with pytest.raises(OSError, match="no space"):
        revisions.write(1, fail)
    with pytest.raises(UserError, match="step 1 was saved without"):
        revisions.write(1, lambda folder: None)
    assert steps(tmp_path) == ["current", "step-000000"]
    assert revisions.target.read_text() == "step-000000\n"
    with pytest.raises(UserError, match="keep is 1"):
        PolicyRevisions(tmp_path, keep=1)


def test_a_disk_that_refuses_does_not_end_the_training(
    tmp_path: Path, tiny_target: Callable[..., str]
) -> None:
    def save(folder: str) -> None:
        raise OSError("no space left on device")

    callback = FollowPolicy(tmp_path / "policy", save=save)
    Trainer(tiny_target("llama"), callback).train(2)
    assert callback.saved is None


def test_a_server_names_its_weights_before_their_first_rollout(
    tmp_path: Path, tiny_target: Callable[..., str], monkeypatch: pytest.MonkeyPatch
) -> None:
    http = Http()
    monkeypatch.setattr(httpx, "post", http.post)
    callback = FollowPolicy(tmp_path / "policy", every=2, server="http://engine:8000/")
    named = []
    trainer = Trainer(tiny_target("llama"), callback)
    trainer.train(3, lambda step: named.append((step, http.calls[-1])))
    url = "http://engine:8000/update_weight_version"
    assert named == [(step, (url, {"new_version": str(step)})) for step in range(3)]


def test_a_server_without_the_route_is_left_alone(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    for away in ("http://127.0.0.1:9", "http://a:b"):
        assert not name_weights(away, "1")
        assert f"{away}/update_weight_version cannot be reached" in caplog.text
    monkeypatch.setattr(httpx, "post", Http(404).post)
    assert not name_weights("http://a", "1")
    assert "http://a/update_weight_version answers 404" in caplog.text


def test_a_sharded_policy_is_refused_without_a_way_to_save_it(tmp_path: Path) -> None:
    model = torch.nn.Linear(2, 2)
    assert not is_sharded(model)
    model.weight.ds_id = 0  # type: ignore[assignment]
    state, follow = TrainerState(), FollowPolicy(tmp_path)
    with pytest.raises(UserError, match="the policy is sharded"):
        follow.on_train_begin(ARGS, state, None, model=model)
    assert is_sharded(model)
    # A trainer is there only after its callback.
    follow.save = lambda folder: save_file({"w": torch.ones(1)}, Path(folder, "model.safetensors"))
    follow.on_train_begin(ARGS, state, None, model=model)
    assert (tmp_path / "current").is_file()


def test_wrong_settings_are_one_sentence(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="every is 0"):
        FollowPolicy(tmp_path, every=0)
    with pytest.raises(UserError, match="give FollowPolicy buffer=FOLDER"):
        FollowPolicy(tmp_path).records(lambda **_: [])
