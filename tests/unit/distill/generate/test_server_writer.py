"""Answers from an OpenAI-compatible server: what is asked, what is made of it, and what is tried
again."""

from __future__ import annotations

import json
import threading
from collections.abc import Callable
from typing import Any

import httpx
import pytest
from transformers import BloomConfig

from draftsmith.chat_answers import ChatAnswers
from draftsmith.distill.config import GenerateOptions
from draftsmith.distill.generate.prompts import Prompt
from draftsmith.distill.generate.steps import open_reference
from draftsmith.distill.generate.writers import ServerWriter, WrittenAnswer
from draftsmith.drafters.target.causal_lm import NO_POSITIONS
from draftsmith.errors import UserError
from tests.chat_templates import tokenizer_of

PROMPTS = [Prompt("a", False, [5, 6]), Prompt("b", False, [7])]


class Letters:
    chat_template = bos_token_id = None
    eos_token_id = 0
    added_tokens_decoder = ()

    def apply_chat_template(self, conversation: Any, **options: Any) -> str:
        raise ValueError("there is none")

    def encode(self, text: str, *, add_special_tokens: bool = True) -> list[int]:
        return [ord(letter) for letter in text.lower()]

    def decode(self, token_ids: list[int]) -> str:
        return "".join(map(chr, token_ids))


class Server:
    """Answers with `answer(body)`; the first `failures` requests fail with `status`, or with no
    answer at all (0)."""

    def __init__(self, answer: Callable[[dict], dict], *, failures: int = 0, status: int = 503):
        self.answer, self.failures, self.status = answer, failures, status
        self.asked: list[dict[str, Any]] = []
        self.lock = threading.Lock()

    def __call__(self, request: httpx.Request) -> httpx.Response:
        if request.url.path == "/v1/models":
            return httpx.Response(200, json={"data": [{"id": "first"}, {"id": "second"}]})
        with self.lock:
            self.asked.append(
                json.loads(request.content) | {"auth": request.headers.get("authorization")}
            )
            if len(self.asked) <= self.failures:
                if self.status == 0:
                    raise httpx.ConnectError("refused")
                return httpx.Response(self.status, text="busy")
        return httpx.Response(200, json={"choices": [self.answer(self.asked[-1])]})


def writer(server: Server, wait_s: float = 60.0, **options: Any) -> ServerWriter:
    config = GenerateOptions(target="t", prompts="p", out="o", url="http://host:1/v1", **options)
    return ServerWriter(
        config, ChatAnswers(Letters()), transport=httpx.MockTransport(server), pause_s=0.0,
        wait_s=wait_s,
    )  # fmt: skip


def written(writing: ServerWriter, prompts: list[Prompt], seeds: list[int]) -> list[WrittenAnswer]:
    return [text for _, text in sorted(writing.write(prompts, seeds))]


def test_a_target_may_name_no_number_of_positions(tmp_path):
    tokenizer_of("{{ messages }}").save_pretrained(tmp_path)
    BloomConfig(vocab_size=300, hidden_size=8, n_layer=1, n_head=1).save_pretrained(tmp_path)
    config = GenerateOptions(target=str(tmp_path), prompts="p", out="o", url="http://host:1/v1")
    assert open_reference(config).max_positions == NO_POSITIONS


def test_token_ids_go_and_come(tmp_path):
    server = Server(lambda body: {"token_ids": [*body["prompt"], 9], "text": "whatever"})
    options = {"temperature": 0.5, "top_k": 7, "max_tokens": 3, "api_key": "k", "batch": 1}
    found = written(writer(server, **options), PROMPTS, [1 << 40, 3])
    assert [one.ids for one in found] == [[5, 6, 5, 6, 9], [7, 7, 9]]
    assert [one.mask for one in found] == [[0, 0, 1, 1, 1], [0, 1, 1]]
    by_prompt = {tuple(body["prompt"]): body for body in server.asked}
    asked = by_prompt[7,]
    assert (asked["model"], asked["temperature"], asked["top_k"], asked["max_tokens"]) == (
        "first",
        0.5,
        7,
        3,
    )
    assert asked["seed"] == 3 and asked["return_token_ids"] and asked["auth"] == "Bearer k"
    assert by_prompt[5, 6]["seed"] == 0  # seeds are cut to what every server takes


def test_text_alone_is_tokenised_and_checked():
    def with_text(text: str, reason: str) -> list[int]:
        server = Server(lambda body: {"text": text, "finish_reason": reason})
        return written(writer(server, model="second"), PROMPTS[:1], [0])[0].ids[2:]

    assert with_text("ab", "length") == [97, 98]
    assert with_text("ab", "stop") == [97, 98, 0]
    with pytest.raises(UserError, match="gives no token ids"):
        with_text("AB", "stop")


@pytest.mark.parametrize("status", [503, 429, 0])
def test_a_busy_server_is_asked_again(status):
    server = Server(lambda body: {"token_ids": [1]}, failures=2, status=status)
    assert [one.ids for one in written(writer(server), PROMPTS[1:], [0])] == [[7, 1]]
    assert len(server.asked) == 3


def test_a_server_that_stays_away_or_refuses_is_named():
    away = Server(lambda body: {}, failures=10**6)
    with pytest.raises(
        UserError, match=r"http://host:1 does not answer .* 503: busy.*the same command again"
    ):
        written(writer(away, wait_s=0.01), PROMPTS[:1], [0])
    assert len(away.asked) > 1
    refusing = Server(lambda body: {}, failures=10**6, status=400)
    with pytest.raises(UserError, match="status 400"):
        written(writer(refusing), PROMPTS[:1], [0])
    assert len(refusing.asked) == 1
    with pytest.raises(UserError, match="OpenAI-compatible"):
        written(writer(Server(lambda body: {"content": "x"})), PROMPTS[:1], [0])


def test_a_slow_answer_holds_up_no_other_and_an_error_sends_no_more():
    """Two at a time: beside one answer that takes until the others are there, all others pass."""
    prompts = [Prompt(str(n), False, [n]) for n in range(6)]
    others = threading.Semaphore(0)

    def answer(body: dict) -> dict:
        if body["prompt"] == [0]:
            assert all(others.acquire(timeout=30) for _ in range(5))
        others.release()
        return {"token_ids": [9]}

    found = [number for number, _ in writer(Server(answer), batch=2).write(prompts, range(6))]
    assert sorted(found) == list(range(6)) and found[-1] == 0
    refusing = Server(lambda body: {"content": "x"})
    with pytest.raises(UserError):
        written(writer(refusing, batch=1), prompts * 50, [0] * 300)
    assert len(refusing.asked) < 300
