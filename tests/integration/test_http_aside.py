"""A text that takes long to read holds up nobody but its own request; an engine that failed says
so."""

from __future__ import annotations

import threading
from collections.abc import Callable
from importlib import import_module
from typing import Any

import pytest

from draftsmith.drafters.target.target import Target
from draftsmith.serve.config import EngineConfig

PROMPT = {"model": "tiny", "prompt": "x", "max_tokens": 1}
CHAT = {"model": "tiny", "messages": [{"role": "user", "content": "x"}], "max_tokens": 1}


@pytest.fixture(scope="module")
def server(target: Target, live_server: Callable) -> Any:
    return live_server(target, None, EngineConfig(compile="off"))


@pytest.mark.parametrize(
    ("module", "name", "path", "body"),
    [
        ("http.completions", "completion_prompts", "/v1/completions", PROMPT),
        ("http.tokens", "rendered", "/v1/chat/completions", CHAT),
        ("http.completions", "bad_word_tokens", "/v1/completions", PROMPT),
        (
            "requests.input_processor",
            "sampling_state",
            "/v1/completions",
            PROMPT,
        ),  # compiles grammars
        ("http.endpoints", "encode", "/tokenize", {"model": "tiny", "prompt": "x"}),
    ],
)
def test_other_clients_are_served_while_a_text_is_read(
    module: str,
    name: str,
    path: str,
    body: dict[str, Any],
    server: Any,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    owner = import_module(f"draftsmith.serve.{module}")
    work, begun, go_on = getattr(owner, name), threading.Event(), threading.Event()

    def slow(*arguments: Any, **options: Any) -> Any:
        begun.set()
        assert go_on.wait(30)
        return work(*arguments, **options)

    monkeypatch.setattr(owner, name, slow)
    statuses: list[int] = []
    client = threading.Thread(
        target=lambda: statuses.append(server.http.post(path, json=body).status_code)
    )
    client.start()
    try:
        assert begun.wait(30)
        assert server.http.get("/health", timeout=10).status_code == 200
        assert not statuses
    finally:
        go_on.set()
        client.join()
    assert statuses == [200]


def test_a_dead_engine_is_unhealthy_and_refuses(target: Target, live_server: Callable) -> None:
    server = live_server(target, None, EngineConfig(compile="off"))

    def broken(*_: object) -> None:
        raise RuntimeError("the device is gone")

    server.engine.runner.run = broken
    statuses = [server.complete("x", max_tokens=4).status_code for _ in range(3)]
    assert statuses == [500, 500, 500]
    refused = server.complete("x", max_tokens=4)
    assert refused.status_code == 503 and refused.json()["error"]["code"] == "engine_dead"
    assert server.http.get("/health").status_code == 503
    assert server.http.get("/metrics").status_code == 200
