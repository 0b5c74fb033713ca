"""What is added to a request is taken out of its answer, byte by byte, or not added at all."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from typing import Any

import httpx
import pytest

from draftsmith.fleet.observe.endpoints import ENDPOINTS, read_answer
from draftsmith.fleet.observe.enrich import Editing, EngineProbe, Enrichment, Form, Restoring

CHATS = {"messages": [{"role": "user", "content": "x"}]}
REQUESTS = {"/v1/completions": {"prompt": "x"}, "/v1/chat/completions": CHATS}
FORMS = [(path, is_stream) for path in REQUESTS for is_stream in (False, True)]


@pytest.fixture
def probed(
    vllm_like: Any, served: Callable[[Any], str], observed: Callable[..., Any]
) -> Iterator[Callable[..., Any]]:
    """`probed(top)`: a server, its URL, and a proxy that may enrich what the probe found."""

    def probe(top: int | None) -> Any:
        url = served(vllm_like)
        proxy = observed(url)
        with httpx.Client(base_url=url) as http:
            EngineProbe(http, proxy.enrichment, top=top).look()
        vllm_like.bodies.clear()
        return vllm_like, url, proxy

    yield probe


def same(url: str, proxy: Any, path: str, body: dict[str, Any]) -> tuple[bytes, bytes]:
    direct = httpx.post(url + path, json=body)
    proxied = proxy.http.post(path, json=body)
    assert (proxied.status_code, proxied.headers) == (direct.status_code, direct.headers)
    return proxied.content, direct.content


@pytest.mark.parametrize("top", [2, None])
def test_enriched_answers_are_plain_for_their_clients(
    probed: Callable[..., Any], top: int | None
) -> None:
    server, url, proxy = probed(top)
    assert set(proxy.enrichment.forms) == {Form(*form) for form in FORMS}
    for number, (path, is_stream) in enumerate(FORMS):
        body = {"model": "m", **REQUESTS[path], "stream": is_stream}
        ours, theirs = same(url, proxy, path, body)
        assert ours == theirs
        plain, enriched = server.bodies[-2:]
        assert plain == body and enriched["return_token_ids"] is True
        assert bool(enriched.get("logprobs")) == (top is not None)
        while len(proxy.exchanges) <= number:
            pass
        answer = read_answer(
            ENDPOINTS[path], bytes(proxy.exchanges[-1].answer), is_stream=is_stream
        )
        assert answer.token_ids == server.tokens and answer.prompt_ids == server.prompt
        assert len(answer.entries) == (len(server.tokens) if top else 0)


def test_requests_that_ask_for_such_fields_are_left_as_they_are(
    probed: Callable[..., Any],
) -> None:
    server, url, proxy = probed(2)
    own: list[dict[str, Any]] = [
        {"logprobs": 1}, {"return_token_ids": True}, {"echo": True}, {"n": 2},
        {"prompt": ["a", "b"]}, {"prompt_logprobs": 0},
    ]  # fmt: skip
    for fields in own:
        body = {"prompt": "x", **fields}
        ours, theirs = same(url, proxy, "/v1/completions", body)
        assert ours == theirs and server.bodies[-1] == body
    tools = {**CHATS, "stream": True, "tools": [{"type": "function"}]}
    assert len(set(same(url, proxy, "/v1/chat/completions", tools))) == 1
    assert server.bodies[-1] == tools


def test_a_refused_enrichment_is_sent_again_plain(probed: Callable[..., Any]) -> None:
    server, url, proxy = probed(2)
    server.max_logprobs = 1
    ours, theirs = same(url, proxy, "/v1/completions", {"prompt": "x"})
    assert ours == theirs and b"error" not in ours
    assert proxy.counters.refused_enrichments == 1
    # The client's own error is the client's.
    ours, theirs = same(url, proxy, "/v1/completions", {"prompt": "x", "logprobs": 7})
    assert ours == theirs and b"error" in ours


def test_a_server_that_refuses_logprobs_still_gives_ids(
    probed: Callable[..., Any], vllm_like: Any
) -> None:
    vllm_like.max_logprobs = 1
    _, _, proxy = probed(2)
    assert all(
        dict(one.fields) == {"return_token_ids": True} for one in proxy.enrichment.forms.values()
    )


class Changing:
    """Transport of a server whose answer changes with the fields, beside what they bring."""

    def __init__(self, change: Callable[[dict[str, Any]], None]):
        self.change = change

    def __call__(self, request: httpx.Request) -> httpx.Response:
        if request.url.path == "/v1/models":
            return httpx.Response(200, json={"data": [{"id": "m"}]})
        asked = json.loads(request.content)
        body: dict[str, Any] = {
            "id": "i",
            "choices": [{"text": "a", "logprobs": None}],
            "usage": {},
        }
        if asked.get("return_token_ids"):
            body["choices"][0]["token_ids"] = [3]
            self.change(body)
        if asked.get("stream"):
            return httpx.Response(200, text=f"data: {json.dumps(body)}\n\n")
        return httpx.Response(200, json=body)


@pytest.mark.parametrize(
    ("change", "forms"),
    [
        (lambda body: None, 4),
        (lambda body: body.update(system_fingerprint="f"), 0),
        (lambda body: body["choices"][0].update(text="b"), 0),
        (lambda body: body["choices"][0].pop("token_ids"), 0),  # the field does nothing here
    ],
)
def test_nothing_is_enriched_where_the_bytes_would_differ(
    change: Callable[[dict[str, Any]], None], forms: int
) -> None:
    enrichment = Enrichment()
    with httpx.Client(base_url="http://x", transport=httpx.MockTransport(Changing(change))) as http:
        EngineProbe(http, enrichment, top=None).look()
    assert len(enrichment.forms) == forms


@pytest.mark.parametrize("size", [1, 3, 1000])
def test_events_are_restored_however_they_are_cut(size: int) -> None:
    ways = {"token_ids": "cut", "logprobs": "null", "prompt_token_ids": "cut"}
    editing = Editing(Restoring({}, ways), is_stream=True)
    sent = (
        ': ping\n\ndata: {"choices":[{"text":"é","token_ids":[1,2],"logprobs":{"a":1}}]}\r\n\r\n'
        'event: x\ndata: {"choices": []}\n\ndata: [DONE]\n\ndata: {"tail'
    ).encode()
    wanted = (
        ': ping\n\ndata: {"choices":[{"text":"é","logprobs":null}]}\r\n\r\n'
        'event: x\ndata: {"choices": []}\n\ndata: [DONE]\n\ndata: {"tail'
    ).encode()
    pieces = [sent[at : at + size] for at in range(0, len(sent), size)]
    assert b"".join(map(editing.piece, pieces)) + editing.rest() == wanted
