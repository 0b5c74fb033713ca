"""The proxy in front of vLLM on the CPU: its clients get vLLM's own bytes, and the records are
vLLM's texts with their rounds."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import httpx
import pytest

from draftsmith.distill.buffer.traffic import stitch
from draftsmith.fleet.observe.endpoints import events
from draftsmith.record import hashed_answer
from tests.e2e.test_audit_vllm import model, vllm_server
from tests.integration.test_observe import proxied, read

pytestmark = [pytest.mark.long, pytest.mark.timeout(2400)]

__all__ = ["model"]  # a fixture
TOKENS = 12
CHAT = "{% for one in messages %}{{ one.content }}{% endfor %}"
PATHS: dict[str, dict[str, Any]] = {
    "/v1/completions": {"prompt": [7, 8, 9]},
    "/v1/chat/completions": {"messages": [{"role": "user", "content": "abc"}]},
}
# Of an answer, whatever its tokens are.
OWN = ("id", "created")


def bodies(content: bytes, *, is_stream: bool) -> list[dict[str, Any]]:
    return list(events(content)) if is_stream else [json.loads(content)]


def values(content: bytes, *, is_stream: bool) -> list[dict[str, Any]]:
    """Values of an answer but for those that differ between any two answers."""
    found = bodies(content, is_stream=is_stream)
    return [{name: one for name, one in body.items() if name not in OWN} for body in found]


def tokens_of(body: dict[str, Any]) -> list[int]:
    """Prompt and answer; the prompt's ids stand beside a chat's choices and in a text's choice."""
    choice = body["choices"][0]
    prompt = body.get("prompt_token_ids") or choice.get("prompt_token_ids")
    return [*prompt, *choice["token_ids"]]


def test_clients_get_the_bytes_of_vllm(model: Path, tmp_path: Path) -> None:
    # The target drafts for itself, so that every step drafts.
    speculative = {"method": "draft_model", "model": str(model), "num_speculative_tokens": 3}
    options = ["--per-request-spec-decode-metrics", "detailed", "--chat-template", CHAT]
    expected: dict[str, list[int]] = {}
    with (
        vllm_server(model, tmp_path / "vllm.log", speculative, options=options) as url,
        proxied(url, tmp_path / "seen", sampler="greedy") as proxy,
        httpx.Client(timeout=600) as http,
    ):

        def of_both(path: str, body: dict[str, Any]) -> list[httpx.Response]:
            return [http.post(base + path, json=body) for base in (url, proxy.url)]

        for path, fields in PATHS.items():
            body = {"model": "tiny", **fields, "max_tokens": TOKENS, "temperature": 0}
            body["return_token_ids"] = True
            ids = http.post(url + path, json=body).json()
            for is_stream in (False, True):
                direct, through = of_both(path, {**body, "stream": is_stream})
                assert direct.status_code == through.status_code == 200
                own = values(through.content, is_stream=is_stream)
                assert own == values(direct.content, is_stream=is_stream)
                name = bodies(through.content, is_stream=is_stream)[0]["id"]
                expected[hashed_answer(name)] = tokens_of(ids)
        direct, through = of_both("/v1/completions", {"model": "tiny", "prompt": [1], "n": -1})
        assert direct.status_code == through.status_code == 400
        assert direct.content == through.content
    counters = proxy.counters
    print(counters.line(), dict(counters.left_out))
    assert counters.answers == 4
    records = read(tmp_path / "seen")
    assert set(records) == set(expected)
    in_full = 0
    for name, mine in records.items():
        text = stitch(mine)
        assert text is not None and text.is_scorable and text.tokens == expected[name]
        rounds = [one for one in mine if one.drafted]
        in_full += bool(rounds)
        for one in rounds[:-1]:
            assert one.accepted == len(one.drafted) == 3
    # vLLM counts the steps of whole answers alone.
    assert in_full == counters.with_steps == 2
