"""A target on a server teaches what the same target teaches here."""

from __future__ import annotations

import itertools
import json
import os
import shutil
import sys
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor, as_completed
from dataclasses import replace
from pathlib import Path
from typing import Any

import httpx
import pytest
import torch
from safetensors.torch import load, load_file

from draftsmith.distill import command as distill
from draftsmith.drafters.options import DraftLmOptions
from draftsmith.drafters.remote import connection
from draftsmith.drafters.remote.messages import (
    STATES_PATH,
    TARGET_PATH,
    WEIGHTS_PATH,
    Texts,
    body_of_texts,
)
from draftsmith.drafters.remote.target import RemoteTarget
from draftsmith.drafters.target.target import Target
from draftsmith.errors import UserError
from draftsmith.serve.config import EngineConfig
from draftsmith.serve.http import target_states
from draftsmith.serve.http.limits import ServerLimits
from draftsmith.serve.http.target_states import MOST_REQUESTS
from draftsmith.train.checkpoints import RunFolder
from draftsmith.train.command import run
from draftsmith.train.config import EvalConfig, OnPolicyConfig, OptimConfig, TrainConfig
from draftsmith.train.evaluate import command as evaluation
from tests.forked import Ranks, free_port
from tests.vllm_stand_in import StandIn

MOST = 4096
# What a decision says of the clock and of the processor.
CLOCK = {"time_s", "share"}
SHAPES = {
    "eagle3": {},
    "mtp": {},
    "dflash": {},
    "draft-lm": {"draft_lm": DraftLmOptions(num_layers=1, hidden_size=32)},
}


@pytest.fixture(scope="module")
def server(target_folder: str, live_server: Callable[..., Any]) -> Any:
    return live_server(Target.load(target_folder), None, EngineConfig(), states_max_tokens=MOST)


@pytest.fixture(scope="module")
def outline(target_folder: str, tmp_path_factory: pytest.TempPathFactory) -> str:
    """The target's folder without its weights."""
    folder = tmp_path_factory.mktemp("outline") / "target"
    shutil.copytree(target_folder, folder, ignore=shutil.ignore_patterns("*.safetensors"))
    return str(folder)


@pytest.fixture
def short_wait(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(connection, "WAIT_S", 0.2)


def settings(target: str, data: Path, out: Path, family: str, **changes: Any) -> TrainConfig:
    values = {
        "family": family, "dtype": "float32", "target": target, "data": (str(data),),
        "out": str(out), "steps": 6, "log_every": 1, "batch_size": 4,
        "optim": OptimConfig(schedule="constant", warmup=0.0), "eval_prompts": 4, "eval_tokens": 6,
    }  # fmt: skip
    return TrainConfig(**values | SHAPES[family] | changes)


def same_weights(one: Path, other: Path) -> bool:
    a, b = (load_file(folder / "model.safetensors") for folder in (one, other))
    return a.keys() == b.keys() and all(torch.equal(a[name], b[name]) for name in a)


@pytest.mark.long
@pytest.mark.parametrize("changes", [{}, {"packing": True, "accumulate": 2, "max_length": 64}])
@pytest.mark.parametrize("family", SHAPES)
def test_training_by_a_server_equals_training_here_to_the_bit(
    family: str,
    changes: dict[str, Any],
    server: Any,
    target_folder: str,
    outline: str,
    data: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    here = settings(target_folder, data, tmp_path / "here", family, **changes)
    found_ahead = []
    ahead = RemoteTarget._found_ahead

    def watched(self: RemoteTarget, texts: Any) -> Any:
        found_ahead.append(ahead(self, texts))
        return found_ahead[-1]

    monkeypatch.setattr(RemoteTarget, "_found_ahead", watched)
    there = replace(here, target=outline, out=str(tmp_path / "there"), target_server=server.url)
    run(here)
    run(there)
    assert same_weights(tmp_path / "here", tmp_path / "there")
    batches = here.steps * here.accumulate
    assert sum(one is not None for one in found_ahead) == batches - 1, "all but the first"
    told = [
        [
            {k: v for k, v in json.loads(line).items() if k != "elapsed_s"}
            for line in (tmp_path / name / "metrics.jsonl").open()
        ]
        for name in ("here", "there")
    ]
    assert told[0] == told[1], "figures of the evaluation"


def test_on_policy_texts_are_written_by_a_server_as_here(
    server: Any, target_folder: str, outline: str, data: Path, tmp_path: Path
) -> None:
    own = OnPolicyConfig(share=0.5, refresh=3, k=2, tokens=6)
    here = settings(target_folder, data, tmp_path / "here", "eagle3", on_policy=own)
    there = replace(here, target=outline, out=str(tmp_path / "there"), target_server=server.url)
    run(here)
    run(there)
    assert same_weights(tmp_path / "here", tmp_path / "there")


@pytest.mark.long
def test_a_draft_lm_is_trained_on_the_likeliest_tokens_of_a_server(
    server: Any, target_folder: str, data: Path, tmp_path: Path
) -> None:
    """With all tokens of the vocabulary they are whole distributions, but for rounding."""
    whole = settings(target_folder, data, tmp_path / "whole", "draft-lm", packing=True)
    for name, top in (("all", 288), ("few", 4)):
        config = replace(whole, out=str(tmp_path / name), target_server=server.url)
        run(replace(config, target_logprobs=top))
    run(whole)
    losses = {
        name: [json.loads(line).get("loss") for line in (tmp_path / name / "metrics.jsonl").open()]
        for name in ("whole", "all", "few")
    }
    known = [loss for loss in losses["whole"] if loss is not None]
    assert len(known) == whole.steps
    assert [one for one in losses["all"] if one is not None] == pytest.approx(known, rel=1e-4)
    assert losses["few"] != losses["all"]
    one = replace(whole, target_server=server.url, target_logprobs=4)
    for changes, says in (
        ({"target_server": None}, "'target_logprobs' is 4, of a live target on target_server"),
        ({"family": "eagle3", "draft_lm": None}, "family 'eagle3' reads states of the target"),
        ({"divergence": "ce"}, "'divergence' needs whole distributions and option 'target_logp"),
    ):
        with pytest.raises(UserError, match=says):
            run(replace(one, **changes))


@pytest.mark.long
def test_two_processes_train_by_one_server(
    server: Any, target_folder: str, data: Path, tmp_path: Path
) -> None:
    alone = settings(target_folder, data, tmp_path / "alone", "eagle3", accumulate=2)
    alone = replace(alone, eval_prompts=0, steps=4)
    run(alone)
    words = [
        sys.executable, "-m", "draftsmith.cli", "train", "eagle3", "--target", target_folder,
        "--data", str(data), "--out", str(tmp_path / "two"), "--dtype", "float32", "--steps", "4",
        "--log-every", "1", "--batch-size", "4", "--eval-prompts", "0", "--target-server",
        server.url, "optim.schedule=constant", "optim.warmup=0",
    ]  # fmt: skip
    environment = os.environ | {"OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""}
    two = Ranks(words, 2, free_port(), environment)
    said, _ = two.communicate(timeout=240)
    assert two.returncode == 0, said
    losses = [
        [json.loads(line)["loss"] for line in (tmp_path / name / "metrics.jsonl").open()]
        for name in ("alone", "two")
    ]
    assert losses[1] == pytest.approx(losses[0], rel=1e-5)  # sums in another order


@pytest.mark.long
def test_a_draft_lm_is_trained_by_prompt_logprobs(
    server: Any, target_folder: str, data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    one = settings(target_folder, data, tmp_path / "ours", "draft-lm", packing=True)
    one = replace(one, target_server=server.url, target_logprobs=5, eval_prompts=0)
    run(one)
    target = Target.load(target_folder)
    begin = connection.Connection.__init__

    def begin_with_vllm(self: connection.Connection, url: str) -> None:
        begin(self, url, transport=httpx.MockTransport(StandIn(target)))

    monkeypatch.setattr(connection.Connection, "__init__", begin_with_vllm)
    theirs = replace(one, out=str(tmp_path / "theirs"), target_server="http://vllm")
    run(theirs)
    losses = [
        [json.loads(line)["loss"] for line in (tmp_path / name / "metrics.jsonl").open()]
        for name in ("ours", "theirs")
    ]
    assert losses[1] == pytest.approx(losses[0], rel=1e-4)
    for changes, says in (
        ({"eval_prompts": 4}, "'eval_prompts' is 4 and target server .* prompt_logprobs alone"),
        ({"target_logprobs": 0}, "gives no states of its target"),
    ):
        with pytest.raises(UserError, match=says):
            run(replace(theirs, out=str(tmp_path / "none"), **changes))


@pytest.fixture
def dying(
    live_server: Callable[..., Any], target_folder: str, monkeypatch: pytest.MonkeyPatch
) -> Callable[[int], str]:
    """`dying(passes)`: URL of a server that ends after so many passes."""

    def start(passes: int) -> str:
        target = Target.load(target_folder)
        server = live_server(target, None, EngineConfig(), states_max_tokens=MOST)
        states, left = connection.Connection.states, passes

        def counted(own: connection.Connection, texts: Any) -> Any:
            nonlocal left
            left -= own.base == server.url
            if left < 0:
                server.close()
            return states(own, texts)

        monkeypatch.setattr(connection.Connection, "states", counted)
        return server.url

    return start


@pytest.mark.long
def test_a_run_whose_server_is_lost_ends_and_goes_on_from_its_checkpoint(
    server: Any,
    target_folder: str,
    data: Path,
    tmp_path: Path,
    short_wait: None,
    dying: Callable[[int], str],
) -> None:
    whole = settings(target_folder, data, tmp_path / "whole", "eagle3", eval_prompts=0)
    whole = replace(whole, save_every=2, target_server=server.url)
    run(whole)
    lost = replace(whole, out=str(tmp_path / "lost"), target_server=dying(6))
    with pytest.raises(UserError, match=r"does not answer \(.*refused.*\); start it, then the"):
        run(lost)
    newest = RunFolder(lost.out).newest()
    assert newest is not None and newest.step in (2, 4)
    run(replace(lost, target_server=server.url))  # at another address
    assert same_weights(tmp_path / "whole", tmp_path / "lost")


def test_a_run_goes_on_with_its_own_target_alone(
    server: Any,
    live_server: Callable[..., Any],
    tiny_target: Callable[..., str],
    outline: str,
    data: Path,
    tmp_path: Path,
) -> None:
    begun = settings(outline, data, tmp_path / "run", "eagle3", steps=2, save_every=2)
    begun = replace(begun, target_server=server.url, eval_prompts=0)
    run(begun)
    other = Target.load(tiny_target("llama", 1))
    elsewhere = live_server(other, None, EngineConfig(), states_max_tokens=MOST)
    with pytest.raises(UserError, match=f"holds a run for a target of revision .*{other.revision}"):
        run(replace(begun, steps=4, target_server=elsewhere.url))


def test_another_target_than_the_servers_is_refused(
    server: Any, tiny_target: Callable[..., str], data: Path, tmp_path: Path
) -> None:
    wrong = {
        tiny_target("qwen3"): r"another model .*\(its \w+ is",
        tiny_target("llama", 1): r"another model .*\(its weights are others\)",
    }
    for folder, says in wrong.items():
        with pytest.raises(UserError, match=says):
            run(settings(folder, data, tmp_path / "out", "eagle3", target_server=server.url))


def test_weights_that_change_under_a_run_end_it(
    live_server: Callable[..., Any],
    target_folder: str,
    data: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    target = Target.load(target_folder)
    server = live_server(target, None, EngineConfig(), states_max_tokens=MOST)
    states = connection.Connection.states

    def changed(own: connection.Connection, texts: Any) -> Any:
        target.revision = "other"
        return states(own, texts)

    monkeypatch.setattr(connection.Connection, "states", changed)
    with pytest.raises(UserError, match=r"other weights than when this run began \(revision other"):
        run(settings(target_folder, data, tmp_path / "out", "eagle3", target_server=server.url))


def test_a_server_that_gives_no_states_or_not_so_many_is_named(
    live_server: Callable[..., Any],
    target_folder: str,
    data: Path,
    tmp_path: Path,
    short_wait: None,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    target = Target.load(target_folder)
    limits = ServerLimits(api_keys=("secret",))
    closed = live_server(target, None, EngineConfig())
    small = live_server(target, None, EngineConfig(), limits=limits, states_max_tokens=16)
    one = settings(target_folder, data, tmp_path / "out", "eagle3")
    wrong = {
        closed.url: "gives no states of its target .*--states-max-tokens",
        small.url: "asks for another API key; set DRAFTSMITH_API_KEY",
        "http://127.0.0.1:9": "does not answer",
        "nowhere": "does not answer",
    }
    for url, says in wrong.items():
        with pytest.raises(UserError, match=says):
            run(replace(one, target_server=url))
    monkeypatch.setenv("DRAFTSMITH_API_KEY", "secret")
    with pytest.raises(UserError, match=r"positions, padding included, and target server .* 16;"):
        run(replace(one, target_server=small.url))


def test_requests_for_states_are_checked_and_leave_answers_alone(
    live_server: Callable[..., Any], target_folder: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    target = Target.load(target_folder)
    server = live_server(target, None, EngineConfig(), states_max_tokens=MOST)
    texts = Texts(ids=torch.arange(3, 15), lengths=torch.tensor([12]), width=12)
    long = replace(texts, width=MOST + 1)
    for content, says in (
        (b"{}", "the body holds no texts"),
        (body_of_texts(long), "more than the 4096 of --states-max-tokens"),
        (body_of_texts(replace(texts, taps=(7,))), "tap 7 does not exist"),
    ):
        refused = server.http.post(STATES_PATH, content=content)
        assert refused.status_code == 400 and says in refused.json()["error"]["message"]
    assert server.http.get(f"{WEIGHTS_PATH}/9").status_code == 400
    asked = {"max_tokens": 24, "temperature": 0, "ignore_eos": True, "return_token_ids": True}
    alone = server.complete([5, 6, 7], **asked).json()["choices"][0]["token_ids"]
    wanted = target.states(texts.ids[None], torch.ones(1, 12), (1,))
    with ThreadPoolExecutor(3) as pool:
        answer = pool.submit(server.complete, [5, 6, 7], **asked)
        body = body_of_texts(replace(texts, taps=(1,)))
        states = [pool.submit(server.http.post, STATES_PATH, content=body) for _ in range(8)]
        for one in states:
            found = load(one.result().content)
            assert torch.equal(found["taps"], wanted[0][0])
            assert torch.equal(found["hidden"], wanted[1][0])
        assert answer.result().json()["choices"][0]["token_ids"] == alone

    def full(*unused: Any) -> None:
        raise torch.OutOfMemoryError("CUDA out of memory")

    monkeypatch.setattr(target, "states", full)
    refused = server.http.post(STATES_PATH, content=body_of_texts(texts))
    assert refused.status_code == 413
    assert "no memory for a pass over 12 positions" in refused.json()["error"]["message"]
    monkeypatch.undo()
    assert server.http.post(STATES_PATH, content=body_of_texts(texts)).status_code == 200
    assert STATES_PATH in server.http.get("/openapi.json").json()["paths"]


def test_many_requests_for_states_leave_the_other_endpoints_alone(
    live_server: Callable[..., Any], target_folder: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    target = Target.load(target_folder)
    server = live_server(target, None, EngineConfig(), states_max_tokens=MOST)
    body = body_of_texts(Texts(ids=torch.arange(3, 6), lengths=torch.tensor([3]), width=3))
    states, going_on, too_many = target.states, threading.Event(), 10

    def waiting(*arguments: Any) -> Any:
        assert going_on.wait(30)
        return states(*arguments)

    monkeypatch.setattr(target, "states", waiting)
    with ThreadPoolExecutor(MOST_REQUESTS + too_many) as pool:
        asked = [
            pool.submit(server.http.post, STATES_PATH, content=body)
            for _ in range(MOST_REQUESTS + too_many)
        ]
        refused = list(itertools.islice(as_completed(asked, timeout=20), too_many))
        assert {one.result().status_code for one in refused} == {429}
        assert refused[0].result().headers["retry-after"]
        assert server.http.get(TARGET_PATH, timeout=5).status_code == 200
        assert server.http.get(WEIGHTS_PATH).status_code == 429
        going_on.set()
        codes = sorted(one.result().status_code for one in asked)
    assert codes == [200] * MOST_REQUESTS + [429] * too_many


def test_bodies_of_weights_are_made_one_at_a_time(
    server: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    at_once = most = 0
    made = target_states.body_of_weights

    def counted(weights: Any) -> bytes:
        nonlocal at_once, most
        at_once += 1
        most = max(most, at_once)
        time.sleep(0.05)
        at_once -= 1
        return made(weights)

    monkeypatch.setattr(target_states, "body_of_weights", counted)
    with ThreadPoolExecutor(6) as pool:
        answers = list(pool.map(server.http.get, [WEIGHTS_PATH, f"{WEIGHTS_PATH}/0"] * 3))
    assert {one.status_code for one in answers} == {200} and most == 1


def test_what_a_server_cannot_do_is_refused(
    server: Any, target_folder: str, data: Path, tmp_path: Path, loop: Callable[..., Any]
) -> None:
    one = settings(target_folder, data, tmp_path / "out", "eagle3", target_server=server.url)
    layers = {"family": "draft-lm", "draft_lm": DraftLmOptions(target_layers=(0,))}
    for changes, says in (
        ({"target_shares": 2}, "'target_shares' is 2 and 'target_server'"),
        ({"target_dtype": "int8"}, "serves in float32 and dtype is 'int8'"),
        (layers, "'draft_lm.target_layers' is .* copies layers"),
    ):
        with pytest.raises(UserError, match=says):
            run(replace(one, **changes))
    learner = loop().config
    recorded = replace(learner.learn, teacher="recorded")
    with pytest.raises(UserError, match=r"learn\.teacher=recorded no pass is made"):
        distill.run(replace(learner, target_server=server.url, learn=recorded))


@pytest.mark.parametrize("family", ["eagle3", "draft-lm"])
def test_a_learner_learns_by_a_server_what_it_learns_here(
    family: str, server: Any, outline: str, loop: Callable[..., Any]
) -> None:
    made = loop(family)
    made.serve(24)
    learn = replace(made.config.learn, steps=6)
    here = replace(made.config, gate=replace(made.config.gate, requests=2), learn=learn)
    there = replace(
        here, target=outline, target_server=server.url, versions=str(made.root / "there")
    )
    told = []
    for config in (here, there):
        distill.run(config)
        lines = (Path(config.versions) / "decisions.jsonl").open()
        told.append(
            [
                {key: value for key, value in json.loads(line).items() if key not in CLOCK}
                for line in lines
            ]
        )
    assert told[0] and told[0] == told[1]
    one, other = (made.state(Path(config.versions))["candidate"] for config in (here, there))
    assert all(torch.equal(one[name], other[name]) for name in one)
    begun = made.draft.state_dict()
    assert any(not torch.equal(one[name], begun[name]) for name in one), "nothing was learned"


def test_a_learner_whose_server_is_lost_ends_and_goes_on(
    server: Any,
    target_folder: str,
    loop: Callable[..., Any],
    short_wait: None,
    dying: Callable[[int], str],
) -> None:
    made = loop("eagle3")
    made.serve(24)
    learn = replace(made.config.learn, steps=6, taps_gib=1e-9)  # texts are read again and again
    config = replace(made.config, learn=learn, save_s=0.0)
    with pytest.raises(UserError, match=r"does not answer \(.*\); start it, then the"):
        distill.run(replace(config, target_server=dying(4)))
    distill.run(replace(config, target_server=server.url))
    assert made.status()["updates"] >= 1


def test_an_evaluation_by_a_server_gives_the_figures_of_one_here(
    server: Any, target_folder: str, outline: str, data: Path, tmp_path: Path
) -> None:
    draft = tmp_path / "draft"
    run(settings(target_folder, data, draft, "eagle3", eval_prompts=0))
    here = EvalConfig(
        target=target_folder, draft=str(draft), data=(str(data),), prompts=8, k=3,
        max_tokens=8, out=str(tmp_path / "here.json"),
    )  # fmt: skip
    there = replace(
        here, target=outline, target_server=server.url, out=str(tmp_path / "there.json")
    )
    assert evaluation.run(here) == evaluation.run(there) == 0
    found = [json.loads(Path(one.out).read_text())["evaluation"] for one in (here, there)]
    assert found[0] == found[1]
    with pytest.raises(UserError, match="passes over trees are made by a target that is here"):
        evaluation.run(replace(there, tree=("dynamic",)))
