"""Applications on real sockets, and a server of a few lines that answers as vLLM does."""

from __future__ import annotations

import asyncio
import json
import threading
import time
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

import httpx
import pytest
import uvicorn
from starlette.requests import Request

from draftsmith.fleet.config import ObserveConfig
from draftsmith.fleet.observe import command
from draftsmith.fleet.observe.exchange import Exchange, Models, Observer, ProxyCounters
from draftsmith.fleet.observe.proxy import Proxy

CONFIG = ObserveConfig(url="http://x", buffer="unused")


@pytest.fixture(scope="module")
def served() -> Iterator[Callable[[Any], str]]:
    """`served(app)`: URL of an ASGI application on a socket of its own, until the module's end."""
    running: list[tuple[uvicorn.Server, threading.Thread]] = []

    def start(app: Any) -> str:
        listener = command.bind("127.0.0.1:0")
        server = command.server(app)
        thread = threading.Thread(target=server.run, kwargs={"sockets": [listener]}, daemon=True)
        thread.start()
        while not server.started:
            time.sleep(0.005)
        running.append((server, thread))
        return f"http://127.0.0.1:{listener.getsockname()[1]}"

    yield start
    for server, thread in reversed(running):
        server.should_exit = True
        thread.join()


def observer_of(
    exchanges: list[Exchange], counters: ProxyCounters, config: ObserveConfig = CONFIG
) -> Observer:
    """Puts exchanges into a list in place of records into a buffer."""
    sink: Any = SimpleNamespace(share=1.0)
    observer = Observer(config, counters, sink, Models("http://x", None), None)
    observer.put = exchanges.append  # type: ignore[method-assign]
    return observer


class Observed:
    """A proxy in front of `url`, with the exchanges that it read."""

    def __init__(self, url: str, served: Callable[[Any], str], config: ObserveConfig = CONFIG):
        self.exchanges: list[Exchange] = []
        self.counters = ProxyCounters()
        observer = observer_of(self.exchanges, self.counters, config)
        self.url = served(Proxy(url, observer))
        self.http = httpx.Client(base_url=self.url, timeout=20)


@pytest.fixture(scope="module")
def observed(served: Callable[[Any], str]) -> Iterator[Callable[..., Observed]]:
    made: list[Observed] = []

    def start(url: str, config: ObserveConfig = CONFIG) -> Observed:
        made.append(Observed(url, served, config))
        return made[-1]

    yield start
    for one in made:
        one.http.close()


class VllmLike:
    """Answers of the forms that vLLM 0.32 gives to `return_token_ids`: a chat's first piece has the
    prompt's ids, and a piece of a stream without content comes for its ids alone."""

    prompt, tokens = [5, 6, 7], [11, 12, 13, 14]

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        data = await Request(scope, receive).body()
        if scope["path"] == "/v1/models":
            await answer(send, [b'{"data":[{"id":"m"}]}'], "application/json")
            return
        body = json.loads(data)
        is_chat = scope["path"].endswith("chat/completions")
        if body.get("stream"):
            await answer(send, self.pieces(is_chat), "text/event-stream")
        else:
            await answer(send, [compact(self.whole(is_chat)).encode()], "application/json")

    def whole(self, is_chat: bool) -> dict[str, Any]:
        text = "Zwölf “Boxkämpfer”\n" * 3
        said = {"message": {"role": "assistant", "content": text}} if is_chat else {"text": text}
        choice = {
            "index": 0, **said, "logprobs": None, "finish_reason": "length", "stop_reason": None,
            "token_ids": self.tokens,
        }  # fmt: skip
        prompt = {"prompt_token_ids": self.prompt}
        if not is_chat:
            choice |= {"prompt_logprobs": None, **prompt}
        report = {
            "num_accepted_draft_tokens": 2, "num_draft_tokens": 3,
            "per_step_accepted": [2], "per_step_drafted": [3],
        }  # fmt: skip
        head = {"id": "cmpl-1f2e", "object": "o", "created": 17, "model": "m"}
        usage = {"prompt_tokens": 3, "total_tokens": 7, "completion_tokens": 4}
        rest = {"metrics": {"speculative_decoding": report}}
        return {**head, "choices": [choice], "usage": usage} | (prompt if is_chat else {}) | rest

    def pieces(self, is_chat: bool) -> list[bytes]:
        head = {"id": "cmpl-1f2e", "object": "o", "created": 17, "model": "m"}
        found: list[Any] = []
        if is_chat:
            delta = {"role": "assistant", "content": ""}
            first = {"index": 0, "delta": delta, "logprobs": None, "finish_reason": None}
            found.append({**head, "choices": [first], "prompt_token_ids": self.prompt})
        last = len(self.tokens) - 1
        for at, token in enumerate(self.tokens):
            hidden = is_chat and at == 1  # by a parser
            text = f"{token} \u2028\\"
            said: dict[str, Any] = {"delta": {} if hidden else {"content": text}}
            said = said if is_chat else {"text": text}
            choice = {
                "index": 0, **said, "logprobs": None,
                "finish_reason": "length" if at == last else None,
            }  # fmt: skip
            if not is_chat:
                choice["prompt_token_ids"] = self.prompt if at == 0 else None
            choice["token_ids"] = [token]
            found.append({**head, "choices": [choice]})
        lines = [f"data: {compact(one)}\n\n".encode() for one in found]
        return [b": ping\n\n", *lines, b"data: [DONE]\n\n"]


async def answer(send: Any, pieces: list[bytes], kind: str) -> None:
    headers = [(b"content-type", kind.encode()), (b"x-request-id", b"r-1")]
    if len(pieces) == 1:
        headers.append((b"content-length", str(len(pieces[0])).encode()))
    await send({"type": "http.response.start", "status": 200, "headers": headers})
    for piece in pieces:
        await send({"type": "http.response.body", "body": piece, "more_body": True})
        await asyncio.sleep(0)
    await send({"type": "http.response.body", "body": b""})


def compact(body: Any) -> str:
    return json.dumps(body, ensure_ascii=False, separators=(",", ":"))
