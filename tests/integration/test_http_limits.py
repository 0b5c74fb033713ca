"""Who may ask and how much: keys, sizes, concurrency, time. Every refusal is an OpenAI error
object."""

from __future__ import annotations

import json
import socket
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import openai
import pytest

from draftsmith.drafters.target.target import Target
from draftsmith.serve.config import EngineConfig
from tests.waiting import wait_until

LONG = {"max_tokens": 200, "ignore_eos": True}


def error(response: Any, status: int, code: str | None) -> dict[str, Any]:
    assert response.status_code == status
    body = response.json()["error"]
    assert set(body) == {"message", "type", "param", "code"} and body["code"] == code
    return body


def test_any_of_several_keys_opens_and_nothing_else_does(
    target: Target, live_server: Callable
) -> None:
    server = live_server(target, None, EngineConfig(), api_key=("first", "second"))
    others = ("Bearer third", "Bearer", "Basic first", "first", "Bearer firs")
    for wrong in (None, *others, "Bearer first second"):
        headers = {} if wrong is None else {"authorization": wrong}
        refused = server.http.get("/v1/models", headers=headers)
        assert error(refused, 401, "invalid_api_key")["type"] == "authentication_error"
        assert refused.headers["www-authenticate"] == "Bearer"
    for key in ("first", "second"):
        headers = {"authorization": f"bearer {key}"}
        assert server.http.get("/v1/models", headers=headers).status_code == 200
    # Nothing of a body is read for someone without a key, and what monitors need is open.
    assert server.http.post("/v1/completions", content=b"{bad").status_code == 401
    for path in ("/health", "/ping", "/version", "/metrics", "/load", "/openapi.json"):
        assert server.http.get(path).status_code == 200
    client = openai.OpenAI(base_url=f"{server.url}/v1", api_key="third", max_retries=0)
    with pytest.raises(openai.AuthenticationError):
        client.models.list()


@pytest.mark.parametrize("chunked", [False, True])
def test_a_body_that_is_too_large_is_refused(
    chunked: bool, target: Target, live_server: Callable
) -> None:
    server = live_server(target, None, EngineConfig(), max_body_bytes=2000)
    body = json.dumps({"model": "tiny", "prompt": "x" * 3000}).encode()

    def pieces() -> Iterator[bytes]:
        yield body[:100]
        yield body[100:]

    headers = {"content-type": "application/json"}
    refused = server.http.post(
        "/v1/completions", content=pieces() if chunked else body, headers=headers
    )
    assert "2000" in error(refused, 413, "body_too_large")["message"]
    assert server.complete("x", max_tokens=1).status_code == 200


def test_one_answer_too_many_at_a_time_is_put_off(target: Target, live_server: Callable) -> None:
    server = live_server(target, None, EngineConfig(), max_concurrency=1).slow(0.02)
    body = {"model": "tiny", "prompt": "x", "stream": True, **LONG}
    with server.http.stream("POST", "/v1/completions", json=body) as answer:
        lines = answer.iter_lines()
        next(lines)
        assert server.http.get("/load").json() == {"server_load": 1}
        refused = server.complete("y", max_tokens=1)
        assert error(refused, 429, "overloaded")["type"] == "rate_limit_error"
        assert refused.headers["retry-after"] == "1"
        # Whatever makes no answers goes on.
        assert server.http.get("/v1/models").status_code == 200
    wait_until(lambda: server.http.get("/load").json() == {"server_load": 0})
    assert server.complete("y", max_tokens=1).status_code == 200


def test_a_full_queue_puts_off_and_what_never_fits_is_refused(
    target: Target, live_server: Callable
) -> None:
    server = live_server(target, None, EngineConfig(max_batch=1, max_queue=2)).slow(0.03)
    threads = [
        threading.Thread(target=lambda: server.complete("a", **{**LONG, "max_tokens": 25}))
        for _ in range(3)
    ]
    scheduler = server.engine.scheduler
    for number, thread in enumerate(threads):
        thread.start()
        # One in the batch, then two in the queue.
        wait_until(lambda n=number: len(scheduler.running) + len(scheduler.waiting) > n)
    refused = server.complete("b", max_tokens=1)
    assert error(refused, 429, "overloaded") and refused.headers["retry-after"] == "1"
    assert error(server.complete(["a", "b", "c"], max_tokens=1), 400, None)["param"] == "prompt"
    assert error(server.complete("a", n=3, max_tokens=1), 400, None)["param"] == "n"
    for thread in threads:
        thread.join()
    assert server.complete("b", max_tokens=1).status_code == 200


def test_a_request_that_takes_too_long_is_ended(target: Target, live_server: Callable) -> None:
    server = live_server(target, None, EngineConfig(), request_timeout_s=0.3).slow(0.05)
    assert error(server.complete("x", **LONG), 408, "timeout")["type"] == "timeout_error"
    events = server.events("/v1/completions", prompt="x", **LONG)
    assert events[-1]["error"]["code"] == "timeout"
    client = openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0)
    with pytest.raises(openai.APIError, match="no answer within"):
        asked: Any = {"model": "tiny", "prompt": "x", "stream": True, "max_tokens": 200}
        list(client.completions.create(**asked, extra_body={"ignore_eos": True}))
    wait_until(lambda: not server.engine.scheduler.busy)  # ended requests do not go on
    assert server.complete("x", max_tokens=1).status_code == 200


def test_a_server_that_goes_down_says_so(target: Target, live_server: Callable) -> None:
    server = live_server(target, None, EngineConfig()).slow(0.02)
    body = {"model": "tiny", "prompt": "x", "stream": True, **LONG}
    with server.http.stream("POST", "/v1/completions", json=body) as response:
        lines = response.iter_lines()
        next(lines)
        server.loop.close()
        rest = [line for line in lines if line]
    assert json.loads(rest[-2].removeprefix("data: "))["error"]["code"] == "shutting_down"
    assert rest[-1] == "data: [DONE]"
    assert error(server.complete("x"), 503, "shutting_down")["type"] == "server_error"
    assert server.http.get("/health").status_code == 503


def connected(server: Any, sent: bytes) -> socket.socket:
    """A connection on which the beginning of a request was sent."""
    connection = socket.create_connection(("127.0.0.1", int(server.url.rpartition(":")[2])))
    connection.settimeout(60)
    connection.sendall(sent)
    return connection


def head(num_bytes: int) -> bytes:
    return (
        "POST /v1/completions HTTP/1.1\r\nhost: x\r\ncontent-type: application/json\r\n"
        f"content-length: {num_bytes}\r\n\r\n"
    ).encode()


def answer_to(connection: socket.socket) -> bytes:
    """All that comes until the server closes."""
    answer = b""
    with connection:
        while piece := connection.recv(65536):
            answer += piece
    return answer


def test_heads_and_bodies_that_do_not_come_hold_nobody_up_and_are_given_up(
    target: Target, live_server: Callable
) -> None:
    server = live_server(target, None, EngineConfig(), request_timeout_s=1.0, max_concurrency=2)
    begun_s = time.monotonic()
    bodies = [connected(server, head(100) + b"{") for _ in range(4)]
    heads = [connected(server, sent) for sent in (b"", b"POST /v1/compl", head(100)[:-2])]
    assert server.complete("x", max_tokens=1).status_code == 200
    for connection in bodies:
        answer = answer_to(connection)
        assert answer.startswith(b"HTTP/1.1 408") and b'"code":"timeout"' in answer
    assert [answer_to(connection) for connection in heads] == [b""] * 3
    assert 1.0 <= time.monotonic() - begun_s < 15
    assert server.http.get("/load").json() == {"server_load": 0}
    # Not on a connection that waits for its next request, nor on one that waits for an answer.
    server.slow(0.02)
    assert server.complete("x", max_tokens=10).status_code == 200


def test_the_time_of_a_request_begins_when_it_arrives(
    target: Target, live_server: Callable
) -> None:
    server = live_server(target, None, EngineConfig(), request_timeout_s=2.5).slow(0.05)
    body = json.dumps({"prompt": "x", **LONG}).encode()
    begun_s = time.monotonic()
    connection = connected(server, head(len(body)) + body[:5])
    time.sleep(2.2)
    connection.sendall(body[5:])
    assert connection.recv(12) == b"HTTP/1.1 408"
    connection.close()
    assert time.monotonic() - begun_s < 4.6, "it began when the body had come"


def test_a_prompt_that_cannot_fit_is_not_tokenized(target: Target, live_server: Callable) -> None:
    server = live_server(target, None, EngineConfig())
    most = target.num_positions * max(map(len, target.tokenizer().get_vocab()))
    for prompt in ("x" * (most + 1), "x \n" * 100_000):
        refused = error(server.complete(prompt, max_tokens=1), 400, None)
        assert refused["param"] == "prompt" and f"{len(prompt)} characters" in refused["message"]
    refused = error(server.complete("x" * most, max_tokens=1), 400, None)
    assert refused["param"] == "prompt" and f"{most} tokens" in refused["message"]
    cut = server.complete("x" * (most + 1), max_tokens=1, truncate_prompt_tokens=8)
    assert cut.json()["usage"]["prompt_tokens"] == 8


def test_ids_that_would_keep_everybody_waiting_are_not_decoded(
    target: Target, live_server: Callable
) -> None:
    server = live_server(target, None, EngineConfig())
    refused = error(server.http.post("/detokenize", json={"tokens": [40] * 65_537}), 400, None)
    assert refused["param"] == "tokens" and "65537 ids" in refused["message"]
    decoded = server.told("/detokenize", tokens=[40] * 65_536)["prompt"]
    assert decoded == target.tokenizer().decode([40]) * 65_536
