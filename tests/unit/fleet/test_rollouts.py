"""Completions that a reward function is given, as texts that a learner trains on and judges by."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from transformers import AutoTokenizer

from draftsmith.distill import command
from draftsmith.distill.buffer import buffer
from draftsmith.distill.buffer.buffer import BufferReader, BufferWriter
from draftsmith.distill.buffer.traffic import OpenRequests, ServedText
from draftsmith.distill.config import DistillConfig, GateConfig, LearnConfig
from draftsmith.drafters import checkpoint, versions
from draftsmith.drafters.lm.draft_lm import DraftLm
from draftsmith.drafters.options import DraftLmOptions
from draftsmith.drafters.target.target import Target
from draftsmith.errors import UserError
from draftsmith.fleet import rl
from draftsmith.fleet.rl import Rollouts
from tests.conftest import Records

# As TRL's trainer calls a reward function, beside the columns of the data set.
MORE = {"trainer_state": None, "log_extra": None, "log_metric": None, "answer": ["a", "b"]}
ARGS = SimpleNamespace(temperature=0.7, top_p=1.0, top_k=0, min_p=None, repetition_penalty=1.0)


def reward(prompts: Any, completions: Any, **_: Any) -> list[float]:
    """Length of each."""
    return [float(len(one)) for one in completions]


class Texts(Records):
    """A sink that stitches; `taken` are the texts."""

    def __init__(self) -> None:
        self.open = OpenRequests()

    def put(self, record: Any) -> None:
        self.open.add([record])

    def forget(self, answer: str) -> int:
        return 0

    def taken(self) -> list[ServedText]:
        return self.open.take(idle_s=1e9)


@pytest.fixture
def rollouts(tiny_target: Callable[..., str]) -> Rollouts:
    made = Rollouts(Texts())
    made.begin(AutoTokenizer.from_pretrained(tiny_target("llama")), ARGS)
    return made


def batch(prompts: list[Any], ids: list[list[int]], **changes: Any) -> dict[str, Any]:
    completions = ["x" * len(one) for one in ids]
    return {"prompts": prompts, "completions": completions, "completion_ids": ids, **changes}


def test_rewards_stay_and_completions_become_texts(rollouts: Rollouts) -> None:
    wrapped = rollouts.records(reward)
    rollouts.step = 7
    assert wrapped.__name__ == "reward"  # by which TRL logs it
    assert wrapped(**batch(["def ", "import"], [[5, 6, 7], [8]]), **MORE) == [3.0, 1.0]
    first, second = rollouts.sink.taken()
    prompt = rollouts.tokenizer("def ")["input_ids"]
    assert first.tokens == [*prompt, 5, 6, 7] and second.tokens[-1] == 8
    assert first.is_scorable and first.request != second.request
    for record in first.records:
        assert (record.weight_version, record.temperature, record.drafted) == ("7", 0.7, [])

    async def later(prompts: Any, **_: Any) -> list[float]:
        return [1.0] * len(prompts)

    wrapped = rollouts.records(later)
    assert asyncio.iscoroutinefunction(wrapped)
    assert asyncio.run(wrapped(**batch(["def "], [[9]]))) == [1.0]
    assert [text.tokens[-1] for text in rollouts.sink.taken()] == [9]


def test_messages_go_through_the_chat_template(rollouts: Rollouts) -> None:
    rollouts.tokenizer.chat_template = "{% for m in messages %}<{{ m.content }}>{% endfor %}"
    asked = [{"role": "user", "content": "hi"}]
    said = [{"role": "assistant", "content": "a"}]
    used = [*said, {"role": "tool", "content": "4"}]
    rollouts.put(prompts=[asked] * 2, completions=[said, used], completion_ids=[[5], [6]])
    (text,) = rollouts.sink.taken()  # no policy wrote what a tool answers
    assert text.tokens == [*rollouts.tokenizer("<hi>")["input_ids"], 5]


def test_prompts_have_the_tools_and_variables_of_the_trainer(tiny_target: Any) -> None:
    made = Rollouts(Texts(), template={"tools": [{"name": "add"}]})
    arguments = SimpleNamespace(**vars(ARGS), chat_template_kwargs={"enable_thinking": False})
    made.begin(AutoTokenizer.from_pretrained(tiny_target("llama")), arguments)
    made.tokenizer.chat_template = "{{ tools[0].name }} {{ enable_thinking }}"
    said = [{"role": "assistant", "content": "a"}]
    asked = [{"role": "user", "content": "hi"}]
    made.put(prompts=[asked], completions=[said], completion_ids=[[5]])
    (text,) = made.sink.taken()
    assert text.tokens == [*made.tokenizer("add False")["input_ids"], 5]


def test_of_a_large_batch_some_are_recorded(
    rollouts: Rollouts, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(rl, "MOST_ROLLOUTS", 3)
    rollouts.put(**batch(["a"] * 8, [[at] for at in range(8)]))
    assert [text.tokens[-1] for text in rollouts.sink.taken()] == [0, 3, 6]


def test_what_shapes_the_distribution_further_is_text_and_never_scored(rollouts: Rollouts) -> None:
    rollouts.begin(rollouts.tokenizer, SimpleNamespace(temperature=1.0, repetition_penalty=1.1))
    rollouts.put(**batch(["a"], [[5, 6]]))
    (text,) = rollouts.sink.taken()
    assert not text.is_scorable


def test_what_cannot_be_recorded_does_not_end_the_training(rollouts: Rollouts) -> None:
    rollouts.put(**batch([object()], [[5]]))
    rollouts.put(prompts=["a"], completions=["b"])
    assert rollouts.recorded == 0
    with pytest.raises(UserError, match="'some/reward-model' is no function"):
        rollouts.records("some/reward-model")  # type: ignore[arg-type]


def test_a_learner_trains_and_decides_by_rollouts_alone(
    tmp_path: Path,
    tiny_target: Callable[..., str],
    rollouts: Rollouts,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(buffer, "CLOSE_S", 300.0)  # of a busy machine
    target = Target.load(tiny_target("llama"))
    draft = DraftLm.create(DraftLmOptions(init=tiny_target("llama", 1)), target, seed=0)
    checkpoint.save(draft, tmp_path / "draft", target)
    rollouts.sink = BufferWriter(str(tmp_path / "buffer"))
    for step in range(2):
        rollouts.step = step
        rollouts.put(**batch(["def f"] * 16, [[3 + at, 40, 50 + step, 60, 0] for at in range(16)]))
    rollouts.sink.close()
    assert len(BufferReader(str(tmp_path / "buffer")).read().records) == 32 * 6
    config = DistillConfig(
        target=target.name, draft=str(tmp_path / "draft"), buffer=str(tmp_path / "buffer"),
        versions=str(tmp_path / "versions"), until_idle_s=0.1, poll_s=0.02,
        learn=LearnConfig(steps=2, lr=1e-3),
        gate=GateConfig(every=1, held_out=0.5, held_out_by="request", requests=4),
    )  # fmt: skip
    command.run(config)
    status = json.loads((tmp_path / "versions" / "status.json").read_text())
    assert status["texts"] + status["held_out"] == 32
    (last, *_) = reversed(versions.read_decisions(tmp_path / "versions"))
    assert last["alpha_live"] > 0 and last["requests"] >= 4, "scored at the first depth"
