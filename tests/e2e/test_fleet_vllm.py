"""Rounds recorded inside an unmodified vLLM on the CPU: the texts of its clients token by token,
p as transformers has it, losslessness with the mended kernel, and the same greedy tokens as without
the plugin.

`DRAFTSMITH_VLLM_PYTHON` names the Python of vLLM's own environment (`scripts/test --all` makes one,
with what the plugin needs).
"""

from __future__ import annotations

import json
import random
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, NamedTuple

import httpx
import pytest
import torch
from transformers import AutoModelForCausalLM

from draftsmith.distill.buffer.traffic import ServedText, stitch
from draftsmith.distill.monitor.monitor import look
from draftsmith.record import RoundRecord, hashed_answer
from scripts.bench.fleet.answers import recorded
from scripts.bench.fleet.installed import variables as plugin_variables
from tests.e2e.test_audit_vllm import model, vllm_server
from tests.e2e.workshop import with_noise
from tests.round_records import each

pytestmark = [pytest.mark.long, pytest.mark.timeout(2400)]

VOCAB, K = 288, 3
__all__ = ["model"]  # the fixture


class Answer(NamedTuple):
    id: str
    prompt: list[int]
    tokens: list[int]
    options: dict[str, Any]


@pytest.fixture(scope="module")
def draft(model: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Accepted often, not always."""
    return with_noise(model, tmp_path_factory.mktemp("noisy") / "draft", 0.2)


def requests(count: int, *, greedy: bool = False) -> list[tuple[list[int], dict[str, Any]]]:
    """Prompts, half of which begin alike, with their options: temperatures 1, 0.7 and 0."""
    shared = [random.Random(0).randrange(3, VOCAB) for _ in range(40)]
    made = []
    for index in range(count):
        draws = random.Random(index + 1)
        prompt = [draws.randrange(3, VOCAB) for _ in range(3 + index % 5)]
        options: dict[str, Any] = {
            "temperature": 0.0 if greedy else (1.0, 0.7, 1.0, 0.0)[index % 4],
            "max_tokens": 20 + index % 30,
            "vllm_xargs": {"draftsmith_class": f"class-{index % 2}"},
        }
        made.append(((shared if index % 2 else []) + prompt, options))
    return made


def ask(url: str, asked: Sequence[tuple[list[int], dict[str, Any]]]) -> list[Answer]:
    """Answers to all requests, eight at a time."""

    def one(request: tuple[list[int], dict[str, Any]]) -> Answer:
        prompt, options = request
        body = {"model": "tiny", "prompt": prompt, "return_token_ids": True, **options}
        answer = httpx.post(f"{url}/v1/completions", json=body, timeout=600)
        assert answer.status_code == 200, answer.text
        values = answer.json()
        return Answer(values["id"], prompt, values["choices"][0]["token_ids"], options)

    with ThreadPoolExecutor(8) as pool:
        return list(pool.map(one, asked))


def abort(url: str) -> None:
    """A request whose client goes away."""
    body = {"model": "tiny", "prompt": [5, 6, 7], "max_tokens": 120, "stream": True}
    with httpx.stream("POST", f"{url}/v1/completions", json=body, timeout=60) as stream:
        for _, _line in zip(range(4), stream.iter_lines()):
            pass


def texts_of(records: dict[str, list[RoundRecord]]) -> dict[str, ServedText]:
    """Texts by the hash of their answer's id."""
    texts = {}
    for name, own in records.items():
        text = stitch(own)
        assert text is not None and len(text.records) == len(own)
        texts[name] = text
    return texts


def check_texts(answers: Sequence[Answer], texts: dict[str, ServedText]) -> None:
    for answer in answers:
        text = texts[hashed_answer(answer.id)]
        assert text.tokens == answer.prompt + answer.tokens
        assert text.records[0].request_class == answer.options["vllm_xargs"]["draftsmith_class"]


def z_of(buffer: Path) -> dict[str, float]:
    """z by event of all records."""
    found = look(str(buffer), false_alarm=1e-3).monitor.everything
    for name, counts in found.counts.items():
        print(f"{name}: {counts.happened} of {counts.expected:.1f}, z = {counts.z:.2f}")
    return {name: counts.z for name, counts in found.counts.items()}


def drafting(draft: Path) -> dict[str, Any]:
    return {"method": "draft_model", "model": str(draft), "num_speculative_tokens": K}


def greedy_alone(model: Path, draft: Path, log: Path) -> list[list[int]]:
    """Greedy tokens of vLLM with speculation and without the plugin."""
    with vllm_server(model, log, drafting(draft)) as url:
        return [answer.tokens for answer in ask(url, requests(24, greedy=True))]


def test_recorded_texts_are_those_of_the_clients_and_lossless(
    model: Path, draft: Path, tmp_path: Path
) -> None:
    buffer, expected = tmp_path / "buffer", greedy_alone(model, draft, tmp_path / "alone.txt")
    settings = {
        "buffer": str(buffer), "version": "7", "engine": "e2e", "mend_expand_kernel": True,
        "admin": True,
    }  # fmt: skip
    additional = json.dumps({"draftsmith": settings})
    options = ["--enable-prefix-caching", "--additional-config", additional]
    variables = plugin_variables(tmp_path / "installed")
    log = tmp_path / "log.txt"
    with vllm_server(model, log, drafting(draft), options=options, variables=variables) as url:
        greedy = ask(url, requests(24, greedy=True))
        assert [answer.tokens for answer in greedy] == expected
        answers = ask(url, requests(200))
        asked = requests(4)
        asked[0][1]["vllm_xargs"] = {"draftsmith_record": 0}
        asked[1][1]["presence_penalty"] = 0.5
        asked[2][1]["stop_token_ids"] = list(range(3, VOCAB, 4))
        apart = ask(url, asked)
        abort(url)
        records = recorded(str(buffer), len(greedy) + len(answers) + 3, patience_s=120.0)
        status = httpx.get(f"{url}/draftsmith/status", timeout=60).json()["workers"][0]["records"]
    texts = texts_of(records)
    check_texts([*greedy, *answers, apart[2], apart[3]], texts)
    assert hashed_answer(apart[0].id) not in texts
    penalised = texts[hashed_answer(apart[1].id)]
    assert penalised.tokens == apart[1].prompt + apart[1].tokens
    assert any(one.drafted for one in penalised.records) and not penalised.is_scorable
    print({name: value for name, value in status.items() if name != "writer"})
    assert status["recording"] and status["errors"] == status["dropped_requests"] == 0
    figures = status["writer"]["versions"]["7"]
    print(figures)
    assert 0 < figures["alpha"] < 1 and abs(figures["z"]) < 3 and not figures["alarm"]
    first = next(iter(records.values()))[0]
    assert (first.engine, first.rule, first.sampler) == ("e2e", "chain", "greedy")
    assert first.draft_version == "7" and first.target == str(model)
    check_p(model, [texts[hashed_answer(answer.id)] for answer in answers[:40]])
    assert all(abs(z) < 3 for z in z_of(buffer).values())
    assert look(str(buffer), false_alarm=1e-3).monitor.everything.violations == 0


def check_p(model: Path, texts: Sequence[ServedText]) -> None:
    """The logged p is that of transformers on the same text, within 1e-3."""
    target, worst, count = AutoModelForCausalLM.from_pretrained(model), 0.0, 0
    for text in texts:
        with torch.no_grad():
            logprobs = torch.log_softmax(target(torch.tensor([text.tokens])).logits[0].float(), -1)
        for record in text.records:
            # Positions whose context is the text itself: up to the first rejected one.
            for depth, logged in enumerate(each(record.p[: record.accepted + 1])):
                at = record.position + depth - 1
                if at >= len(text.tokens) - 1:
                    break
                expected = logprobs[at, logged.ids]
                worst = max(worst, float((expected - torch.tensor(logged.logprobs)).abs().max()))
                token = float(logprobs[at, record.drafted[depth]])
                assert logged.drafted == pytest.approx(token, abs=1e-3)
                count += 1
    print(f"largest difference of a logprob {worst:.1e} over {count} positions")
    assert worst < 1e-3 and count > 300
