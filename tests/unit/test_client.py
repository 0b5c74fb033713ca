"""The API key of requests to a server, and connections that a server closes: a request is sent again
on another one, unless it was new."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

import httpx
import pytest

from draftsmith.client import VARIABLE, accepted_keys, base_of, bearer, send, send_async, with_key
from draftsmith.errors import UserError
from draftsmith.serve.bench.client import Client
from draftsmith.serve.bench.command import server_arguments
from draftsmith.serve.bench.config import BenchConfig
from tests.closing_server import EVENT, Closing


@pytest.mark.parametrize(
    "url",
    [
        "", "localhost:8000", "http://", "http://a:0", "http://a:99999", "http://a:b",
        "http://192.168.1.300:8000", "http://ex\u00e4mple..com", "http://a\nb", "ftp://a", "http://[::1",
    ],
)  # fmt: skip
def test_a_url_that_names_no_server_is_one_sentence(url: str) -> None:
    with pytest.raises(UserError, match=r"option 'url' is .*, which names no server; give its URL"):
        base_of(url)


@pytest.mark.parametrize(
    "url", ["http://a", "https://a.b:1/v1/", "http://[::1]:8000", "http://1.2.3.4"]
)
def test_a_server_is_named_without_the_path_of_its_api(url: str) -> None:
    assert base_of(url) == url.removesuffix("/v1/")


def test_an_option_goes_before_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(VARIABLE, raising=False)
    assert bearer(None) == bearer("") == {} and accepted_keys(None) == ()
    monkeypatch.setenv(VARIABLE, "all")
    assert bearer(None) == {"authorization": "Bearer all"}
    assert bearer("one") == {"authorization": "Bearer one"}
    assert accepted_keys(None) == ("all",) and accepted_keys(["one", "two"]) == ("one", "two")
    assert with_key(None)[VARIABLE] == "all" and with_key("one")[VARIABLE] == "one"


def test_the_key_of_a_started_server_is_no_word_of_its_command() -> None:
    assert "one" not in server_arguments(BenchConfig(target="t", api_key="one"))


def test_a_request_on_a_closed_connection_is_sent_again(closing: Callable[[int], Closing]) -> None:
    server = closing(1)
    with httpx.Client(base_url=server.url, timeout=10) as http:
        for _ in range(3):
            request = http.build_request("POST", "/v1/completions", json={"prompt": "x"})
            assert send(http.send, request).content == EVENT
    assert (server.connections, server.requests) == (3, 5)
    with httpx.Client(base_url=server.url, timeout=10) as http:
        http.post("/", json={})
        with pytest.raises(httpx.RemoteProtocolError):  # without it
            http.post("/", json={})


def test_a_request_on_a_new_connection_is_sent_once(closing: Callable[[int], Closing]) -> None:
    server = closing(0)
    with (
        httpx.Client(base_url=server.url, timeout=10) as http,
        pytest.raises(httpx.RemoteProtocolError),
    ):
        send(http.send, http.build_request("POST", "/", json={}))
    assert server.requests == 1


def test_tries_end(closing: Callable[[int], Closing]) -> None:
    """Where nothing says whether a connection is new."""
    sent = []

    def fails(request: httpx.Request) -> httpx.Response:
        sent.append(request)
        raise httpx.ReadError("closed", request=request)

    with pytest.raises(httpx.ReadError):
        send(fails, httpx.Request("POST", "http://server/"))
    assert len(sent) == 4


def test_an_asynchronous_request_is_sent_again_and_on_a_new_connection_once(
    closing: Callable[[int], Closing],
) -> None:
    server, refusing = closing(1), closing(0)

    async def ask() -> None:
        async with httpx.AsyncClient(timeout=10) as http:
            for _ in range(3):
                request = http.build_request("POST", server.url, json={})
                assert (await send_async(http.send, request)).content == EVENT
            with pytest.raises(httpx.RemoteProtocolError):
                await send_async(http.send, http.build_request("POST", refusing.url, json={}))

    asyncio.run(ask())
    assert (server.connections, server.requests, refusing.requests) == (3, 5, 1)


def test_a_benchmark_goes_on_where_a_server_closes_its_connections(
    closing: Callable[[int], Closing],
) -> None:
    async def measure() -> list[int]:
        client = Client(closing(1).url, api_key=None, timeout_s=10)
        result = await client.measure([{"prompt": "x"}] * 4, {}, 1)
        await client.http.aclose()
        return [answer.num_tokens for answer in result.answers]

    assert asyncio.run(measure()) == [1, 1, 1, 1]


def test_a_server_that_hangs_up_at_its_metrics_has_none(closing: Callable[[int], Closing]) -> None:
    server = closing(0)
    client = Client(server.url, api_key=None, timeout_s=10)
    assert not asyncio.run(client.scrape()).counters and server.requests == 1
