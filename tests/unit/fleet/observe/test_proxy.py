"""The proxy changes no byte: answers of a server that shows what it got, directly and through it."""

from __future__ import annotations

import asyncio
import gzip
import json
import logging
import socket
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import httpx
import pytest
from starlette.requests import Request

from draftsmith.fleet.observe import command
from draftsmith.fleet.observe.endpoints import ENDPOINTS, read_answer
from draftsmith.fleet.observe.exchange import Exchange, ProxyCounters
from draftsmith.fleet.observe.proxy import Proxy
from tests.unit.fleet.observe.conftest import VllmLike, observer_of

COMPLETION = {"id": "cmpl-1", "model": "m", "choices": [{"text": "b", "finish_reason": "stop"}]}
PACKED = gzip.compress(b"hello", mtime=0)


class Mirror:
    """Server that answers with the request as it came, and by path in other ways."""

    def __init__(self) -> None:
        self.reached = threading.Event()
        self.disconnected = threading.Event()
        self.go_on = threading.Event()

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        name = scope["path"].rsplit("/", 1)[-1]
        await getattr(self, name if hasattr(self, name) else "shown")(scope, receive, send)

    async def shown(self, scope: Any, receive: Any, send: Any) -> None:
        body = await Request(scope, receive).body()
        # What belongs to one connection may differ.
        headers = [
            [name.decode(), value.decode()]
            for name, value in scope["headers"]
            if name not in (b"host", b"connection", b"transfer-encoding")
        ]
        got = {
            "method": scope["method"], "path": scope["raw_path"].decode(),
            "query": scope["query_string"].decode(), "headers": headers, "length": len(body),
            "sum": sum(body),
        }  # fmt: skip
        status = int(scope["query_string"] or b"200")
        sent = b"" if status in (204, 304) else json.dumps(got).encode()
        answer_headers = [
            (b"content-type", b"application/json"), (b"set-cookie", b"a=1"), (b"x-b", b"\xe9"),
            (b"set-cookie", b"b=2"), (b"server", b"mirror"), (b"date", b"today"),
        ]  # fmt: skip
        if status not in (204, 304):
            answer_headers.append((b"content-length", b"%d" % len(sent)))
        await send({"type": "http.response.start", "status": status, "headers": answer_headers})
        await send({"type": "http.response.body", "body": sent})

    async def packed(self, scope: Any, receive: Any, send: Any) -> None:
        headers = [(b"content-encoding", b"gzip")]
        await send({"type": "http.response.start", "status": 200, "headers": headers})
        await send({"type": "http.response.body", "body": PACKED})

    async def events(self, scope: Any, receive: Any, send: Any) -> None:
        """The second event is sent when the test says so."""
        headers = [(b"content-type", b"text/event-stream")]
        await send({"type": "http.response.start", "status": 200, "headers": headers})
        await send({"type": "http.response.body", "body": b"data: 1\n\n", "more_body": True})
        await asyncio.to_thread(self.go_on.wait, 20)
        await send({"type": "http.response.body", "body": b"data: 2\n\n", "more_body": True})
        await send({"type": "http.response.body", "body": b""})

    async def endless(self, scope: Any, receive: Any, send: Any) -> None:
        self.reached.set()
        await send({"type": "http.response.start", "status": 200, "headers": []})
        await send({"type": "http.response.body", "body": b"x", "more_body": True})
        while (await receive())["type"] != "http.disconnect":
            pass
        self.disconnected.set()

    async def silent(self, scope: Any, receive: Any, send: Any) -> None:
        self.reached.set()
        while (await receive())["type"] != "http.disconnect":
            pass
        self.disconnected.set()

    async def broken(self, scope: Any, receive: Any, send: Any) -> None:
        await send({"type": "http.response.start", "status": 200, "headers": []})
        await send({"type": "http.response.body", "body": b"x" * 10, "more_body": True})

    async def completions(self, scope: Any, receive: Any, send: Any) -> None:
        while (await receive()).get("more_body"):
            pass
        body = json.dumps(COMPLETION).encode()
        await send({"type": "http.response.start", "status": 200, "headers": []})
        await send({"type": "http.response.body", "body": body})


@pytest.fixture(scope="module")
def mirror() -> Mirror:
    return Mirror()


@pytest.fixture(scope="module")
def both(
    mirror: Mirror, served: Callable[[Any], str], observed: Callable[..., Any]
) -> Iterator[tuple[httpx.Client, Any]]:
    """A client of the server itself, and the proxy in front of it."""
    url = served(mirror)
    with httpx.Client(base_url=url, timeout=20) as http:
        yield http, observed(url)


def raw(response: httpx.Response) -> tuple[Any, ...]:
    headers = sorted(pair for pair in response.headers.raw if pair[0] != b"transfer-encoding")
    return response.status_code, headers, response.content


def pieces() -> Iterator[bytes]:
    yield from (bytes([one]) * 300_000 for one in range(10))


@pytest.mark.parametrize(
    ("method", "path", "given"),
    [
        ("GET", "/health", {}),
        ("GET", "/a%2Fb/%C3%A9?200", {"headers": {"x-a": "1", "cookie": "c=1"}}),
        ("HEAD", "/x", {}),
        ("DELETE", "/v1/files/7?204", {}),
        ("GET", "/x?304", {}),
        ("OPTIONS", "/v1/completions?200", {"headers": {"origin": "http://o"}}),
        ("PUT", "/upload", {"content": "pieces"}),
        ("POST", "/v1/audio", {"files": {"file": ("a.wav", b"\0\1" * 999)}}),
        ("POST", "/x?500", {"json": {"a": 1}}),
        ("POST", "/x?429", {"headers": {"authorization": "Bearer k"}}),
        ("GET", "/packed", {"headers": {"accept-encoding": "gzip"}}),
    ],
)
def test_requests_and_answers_pass_unchanged(
    both: tuple[httpx.Client, Any], method: str, path: str, given: dict[str, Any]
) -> None:
    if given.get("content") == "pieces":
        given = {"content": b"".join(pieces())}
    if "files" in given:
        given = given | {"headers": {"content-type": "multipart/form-data; boundary=b"}}
    direct = both[0].request(method, path, **given)
    proxied = both[1].http.request(method, path, **given)
    assert raw(proxied) == raw(direct)
    if direct.content:
        assert both[1].exchanges == []


def test_an_upload_of_unknown_length_passes(both: tuple[httpx.Client, Any]) -> None:
    found = both[1].http.post("/upload", content=pieces()).json()
    assert found["length"] == 3_000_000 and found["sum"] == 300_000 * sum(range(10))


def test_events_come_as_they_are_sent(both: tuple[httpx.Client, Any], mirror: Mirror) -> None:
    mirror.go_on.clear()
    with both[1].http.stream("GET", "/events") as response:
        read = response.iter_raw()
        assert next(read) == b"data: 1\n\n"
        mirror.go_on.set()
        assert b"".join(read) == b"data: 2\n\n"


def test_a_disconnect_of_the_client_ends_the_request(
    both: tuple[httpx.Client, Any], mirror: Mirror
) -> None:
    mirror.disconnected.clear()
    with both[1].http.stream("GET", "/endless") as response:
        # A generator that nobody holds closes the connection when it is collected.
        read = response.iter_raw()
        assert next(read) == b"x"
        assert not mirror.disconnected.is_set()
    assert mirror.disconnected.wait(20)


def test_a_disconnect_within_an_upload_ends_it(both: tuple[httpx.Client, Any]) -> None:
    host, port = both[1].url.removeprefix("http://").split(":")
    with socket.create_connection((host, int(port))) as client:
        client.sendall(b"POST /v1/completions HTTP/1.1\r\nhost: x\r\ncontent-length: 9\r\n\r\n{")
    assert both[1].http.get("/health").status_code == 200


def test_an_answer_that_breaks_off_breaks_off(both: tuple[httpx.Client, Any]) -> None:
    for client in (both[0], both[1].http):
        with pytest.raises(httpx.RemoteProtocolError):
            client.get("/broken")


def test_an_absent_server_is_a_bad_gateway(observed: Callable[..., Any]) -> None:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        url = f"http://127.0.0.1:{free.getsockname()[1]}"
    proxy = observed(url)
    for method, path in (("GET", "/health"), ("POST", "/v1/completions")):
        answer = proxy.http.request(method, path, json={})
        assert answer.status_code == 502 and url in answer.json()["error"]["message"]
    assert proxy.exchanges == []


@pytest.mark.parametrize("path", ["endless", "silent"])
def test_an_answer_that_outlasts_the_end_breaks_off(
    mirror: Mirror, served: Callable[[Any], str], caplog: pytest.LogCaptureFixture, path: str
) -> None:
    """And is none of the proxy's own."""
    mirror.reached.clear()
    mirror.disconnected.clear()
    observer = observer_of([], ProxyCounters())
    listener = command.bind("127.0.0.1:0")
    server = command.server(Proxy(served(mirror), observer))
    server.drain_s = 0.2
    thread = threading.Thread(target=server.run, kwargs={"sockets": [listener]}, daemon=True)
    thread.start()
    while not server.started:
        time.sleep(0.005)

    def end() -> None:
        mirror.reached.wait(20)
        server.should_exit = True

    threading.Thread(target=end, daemon=True).start()
    with pytest.raises((httpx.RemoteProtocolError, httpx.ReadError)):
        httpx.get(f"http://127.0.0.1:{listener.getsockname()[1]}/{path}", timeout=20)
    thread.join(20)
    assert not thread.is_alive() and mirror.disconnected.wait(20)
    assert not [one for one in caplog.records if one.levelno >= logging.ERROR]


def settled(proxy: Any, count: int) -> list[Exchange]:
    """The exchanges that were read, which end just after their clients have the answer."""
    deadline_s = time.monotonic() + 10
    while len(proxy.exchanges) < count and time.monotonic() < deadline_s:
        time.sleep(0.005)
    return proxy.exchanges


def test_answers_are_read_as_they_pass(both: tuple[httpx.Client, Any]) -> None:
    proxy = both[1]
    before = len(proxy.exchanges)
    body = {"prompt": "a", "vllm_xargs": {"draftsmith_class": "code", "draftsmith_share": 0.999999}}
    assert proxy.http.post("/v1/completions", json=body).json() == COMPLETION
    exchange = settled(proxy, before + 1)[-1]
    assert json.loads(exchange.answer) == COMPLETION and exchange.request == body
    assert (exchange.request_class, exchange.share) == ("code", 0.999999)


@pytest.mark.parametrize("is_stream", [False, True])
@pytest.mark.parametrize("path", list(ENDPOINTS))
def test_ids_of_a_client_that_requests_them_are_read(
    served: Callable[[Any], str], observed: Callable[..., Any], path: str, is_stream: bool
) -> None:
    url, body = served(VllmLike()), {"return_token_ids": True, "stream": is_stream}
    proxy = observed(url)
    direct, through = (httpx.post(base + path, json=body) for base in (url, proxy.url))
    assert (through.headers, through.content) == (direct.headers, direct.content)
    (exchange,) = settled(proxy, 1)
    answer = read_answer(exchange.endpoint, bytes(exchange.answer), is_stream=is_stream)
    assert (answer.prompt_ids, answer.token_ids) == (VllmLike.prompt, VllmLike.tokens)


def test_requests_that_opt_out_are_not_read(both: tuple[httpx.Client, Any]) -> None:
    proxy = both[1]
    before, left_out = len(proxy.exchanges), proxy.counters.left_out["by the client"]
    out: list[dict[str, Any]] = [
        {"json": {"prompt": "a"}, "headers": {"x-draftsmith-learn": "off"}},
        {"json": {"prompt": "a", "vllm_xargs": {"draftsmith_record": "false"}}},
    ]
    for given in out:
        assert proxy.http.post("/v1/completions", **given).json() == COMPLETION
    none = {"prompt": "a", "vllm_xargs": {"draftsmith_share": 0}}
    assert proxy.http.post("/v1/completions", json=none).json() == COMPLETION
    assert proxy.http.post("/v1/completions", content=b"no JSON").json() == COMPLETION
    assert proxy.counters.left_out["by the client"] == left_out + 2
    assert proxy.counters.left_out["by share"] == 1
    time.sleep(0.05)
    assert len(proxy.exchanges) == before


HUGE = b'{"prompt": "a", "vllm_xargs": {"draftsmith_share": 1%s}}' % (b"0" * 400)


@pytest.mark.parametrize("body", [b"[" * 100_000, HUGE, b"\xff"], ids=["deep", "huge", "bytes"])
def test_a_request_that_cannot_be_read_is_the_servers(
    both: tuple[httpx.Client, Any], body: bytes
) -> None:
    assert both[1].http.post("/v1/completions", content=body).json() == COMPLETION


def test_a_server_that_closes_kept_connections_is_no_bad_gateway(
    observed: Callable[..., Any], closing: Callable[[int], Any]
) -> None:
    """As llama-server does. An upload that is handed on unread cannot be sent twice."""
    proxy = observed(closing(1).url)
    for method, path in [("POST", "/v1/completions")] * 3 + [("GET", "/v1/models")] * 2:
        given = {"json": {"prompt": "x"}} if method == "POST" else {}
        assert proxy.http.request(method, path, **given).status_code == 200
    statuses = {proxy.http.post("/v1/files", content=b"x").status_code for _ in range(4)}
    assert 502 in statuses
