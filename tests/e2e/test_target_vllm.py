"""A target that vLLM serves on the CPU: its answers, and a draft LM trained on its `prompt_logprobs`,
which must be what the same target here gives.

`DRAFTSMITH_VLLM_PYTHON` names the Python of vLLM's own environment (`scripts/test --all` makes
one).
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch

from draftsmith.drafters.interface import TextBatch
from draftsmith.drafters.options import DraftOptions
from draftsmith.drafters.target.target import Target
from draftsmith.errors import UserError
from draftsmith.files import read_json
from draftsmith.train.command import run
from draftsmith.train.config import OptimConfig, TrainConfig
from draftsmith.train.objective.prompt_logprobs import PatientServer, PromptLogprobs
from scripts.paths import ROOT
from tests.e2e.test_audit_vllm import vllm_server
from tests.e2e.workshop import draftsmith, texts

pytestmark = [pytest.mark.long, pytest.mark.timeout(1800)]

TARGET = ROOT / "scripts/quickstart_target"
TOP, MAX_TOKENS, MAX_MODEL_LEN, KEY = 32, 48, 128, "secret"


class Place(NamedTuple):
    folder: Path  # with `data`: answers of the target and TOP likeliest tokens of each distribution
    url: str  # of vLLM


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Place]:
    folder = tmp_path_factory.mktemp("target-vllm")
    answers(folder, "data", "--temperature", "1", "--top-logprobs", str(TOP))
    options = ("--max-logprobs", str(TOP), "--api-key", KEY)
    with vllm_server(TARGET, folder / "vllm.log", None, options=options) as url:
        yield Place(folder, url)


@pytest.fixture(autouse=True)
def key(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DRAFTSMITH_API_KEY", KEY)


def answers(folder: Path, out: str, *options: str) -> None:
    draftsmith(
        folder, "generate", "--target", str(TARGET), "--prompts", "stdlib:code", "--count", "64",
        "--prompt-tokens", "32", "--max-tokens", str(MAX_TOKENS), "--batch", "32", "--dtype", "float32",
        "--out", out, *options,
    )  # fmt: skip


@pytest.fixture
def settings(place: Place) -> TrainConfig:
    """By a teacher that is stored."""
    return TrainConfig(
        family="draft-lm", target=str(TARGET), data=(str(place.folder / "data"),), dtype="float32",
        out=str(place.folder / "stored"), steps=30, log_every=1, batch_size=8, held_out=0.2,
        max_length=80, eval_prompts=0, teacher="stored",
        optim=OptimConfig(lr=3e-3, schedule="constant", warmup=0.0),
        draft=DraftOptions(num_layers=1, hidden_size=128),
    )  # fmt: skip


@pytest.fixture
def losses(settings: TrainConfig, place: Place) -> Callable[..., torch.Tensor]:
    """`losses(name, **changes)`: those of all steps of a run into the folder `name`."""

    def train(name: str, **changes: Any) -> torch.Tensor:
        config = replace(settings, out=str(place.folder / name), **changes)
        run(config)
        lines = (Path(config.out) / "metrics.jsonl").read_text().splitlines()
        found = [row["loss"] for row in map(json.loads, lines) if "loss" in row]
        assert len(found) == config.steps
        return torch.tensor(found)

    return train


def tau(folder: Path, name: str) -> dict[str, float]:
    """value, and its 95 % interval: low, high. Of a draft for the target here, on texts that it was
    trained on."""
    draftsmith(
        folder, "eval", "--target", str(TARGET), "--draft", name, "--data", "data", "--held-out",
        "1", "--prompts", "32", "--k", "3", "--max-tokens", "48", "--temperature", "1",
        "--out", f"{name}.json",
    )  # fmt: skip
    (found,) = read_json(folder / f"{name}.json")["evaluation"]
    return found["tau"]


def test_a_draft_lm_learns_from_vllm_what_it_learns_here(
    place: Place, losses: Callable[..., torch.Tensor], monkeypatch: pytest.MonkeyPatch
) -> None:
    served = {"teacher": "live", "target_server": place.url, "target_logprobs": TOP}
    stored, vllm = losses("stored"), losses("vllm", **served)
    apart = (vllm / stored - 1).abs()
    here, there = (tau(place.folder, name) for name in ("stored", "vllm"))
    print(f"losses {stored[0]:.3f} to {stored[-1]:.3f}, tau {here}; by vLLM {there}")
    print(f"losses at most {apart[:10].max():.1e} apart in 10 steps, {apart.max():.1e} in all")
    # Steps make rounding grow.
    assert apart[:10].max() < 2e-5 and apart.max() < 0.05
    assert here["low"] < there["value"] < here["high"] and here["low"] > 1.05
    few = {"steps": 4, **served}
    fewer = losses("fewer", **few | {"target_logprobs": TOP // 8})
    joined = PromptLogprobs._joined

    def shifted(self: PromptLogprobs, rows: Any, length: int) -> Any:
        return joined(self, [*rows[1:], *rows[:1]], length)

    monkeypatch.setattr(PromptLogprobs, "_joined", shifted)
    late = losses("late", **few)
    print(f"with fewer tokens {fewer.tolist()}, a position off {late.tolist()}")
    # Negative controls: other tokens, or other positions, are other losses from the first step on.
    for other in (fewer, late):
        assert ((other / stored[:4] - 1).abs() > 1e-3).all()


def test_likeliest_tokens_are_the_targets(place: Place) -> None:
    """Of all positions of answers, beside those of the distributions of the target here."""
    target = Target.load(str(TARGET), dtype=torch.float32)
    chosen = [torch.tensor([*prompt, *answer]) for prompt, answer in texts(place.folder)[:8]]
    ids = torch.nn.utils.rnn.pad_sequence(chosen, batch_first=True)
    mask = (torch.arange(ids.shape[1]) < torch.tensor([[len(one)] for one in chosen])).long()
    source = PromptLogprobs(PatientServer(place.url, "target_server"), target.vocab_size, TOP)
    rows, columns = mask.bool().nonzero(as_tuple=True)
    text = TextBatch(input_ids=ids, attention_mask=mask, weights=mask.float())
    found = source.read(text, ()).distributions(rows, columns + 1)
    _, hidden = target.states(ids, mask, ())
    logprobs = target.head(hidden).log_softmax(dim=-1)[mask.bool()]
    last = torch.cat([torch.arange(len(one)) == len(one) - 1 for one in chosen])
    ours = logprobs.gather(1, found.ids)[~last]
    torch.testing.assert_close(found.logprobs[~last], ours, rtol=0.0, atol=1e-3)
    # None likelier is missing.
    torch.testing.assert_close(ours, logprobs.topk(TOP).values[~last], rtol=0.0, atol=1e-3)
    assert (found.tail[last] == 1).all()


def test_greedy_answers_of_vllm_are_the_targets(place: Place) -> None:
    answers(place.folder, "here", "--temperature", "0")
    answers(place.folder, "there", "--temperature", "0", "--url", place.url)
    here, there = (texts(place.folder, name) for name in ("here", "there"))
    same = sum(one == other for one, other in zip(here, there, strict=True))
    # Two implementations round differently; a text forks where two logits agree to the last digits.
    assert same >= 60


def test_sampled_answers_of_vllm_end_with_the_end_of_text(place: Place) -> None:
    options = ("--prompts", "stdlib:prose", "--count", "192", "--temperature", "1")
    answers(place.folder, "sampled", "--url", place.url, *options)
    ended = [answer for _, answer in texts(place.folder, "sampled") if len(answer) < MAX_TOKENS]
    assert ended and all(answer.index(0) == len(answer) - 1 for answer in ended)


def test_what_vllm_refuses_is_told_with_its_mend(place: Place, settings: TrainConfig) -> None:
    served = {"teacher": "live", "target_server": place.url, "target_logprobs": TOP}
    one = replace(settings, out=str(place.folder / "none"), **served)
    more = f"{TOP + 1}, which .*; start vLLM with --max-logprobs {TOP + 1}"
    for changes, says in (
        ({"target_logprobs": TOP + 1}, more),
        ({"target_logprobs": 0}, "give target_logprobs=64 too"),
        ({"family": "eagle3", "draft": None}, "states of the target, which no server gives"),
    ):
        with pytest.raises(UserError, match=says):
            run(replace(one, **changes))
    logprobs = PromptLogprobs(PatientServer(place.url, "target_server"), 4096, TOP)
    for length in (MAX_MODEL_LEN, MAX_MODEL_LEN + 1):
        ids = torch.full((1, length), 7)
        mask, weights = torch.ones_like(ids), torch.ones(1, length)
        text = TextBatch(input_ids=ids, attention_mask=mask, weights=weights)
        with pytest.raises(UserError, match=r"give a max_length below its --max-model-len"):
            logprobs.read(text, ())


def test_another_key_is_named(place: Place, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DRAFTSMITH_API_KEY", "other")
    with pytest.raises(UserError, match="asks for another API key; set DRAFTSMITH_API_KEY"):
        PromptLogprobs(PatientServer(place.url, "target_server"), 4096, TOP)
