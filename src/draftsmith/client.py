"""Requests to a server: its API key, of an option or else of the environment, which no list of
processes shows, and kept connections, which a server may close just as the next request leaves.

llama-server closes one now and then after a stream. Such a request is sent again, as long as the
connection was an old one; a request on a new connection is sent once. Send only requests that may
be carried out twice, as completions may. A server's /metrics is parsed here too. Torch-free.
"""

from __future__ import annotations

import json
import os
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any
from urllib.parse import urlsplit

from draftsmith.errors import UserError

if TYPE_CHECKING:
    import httpx


VARIABLE = "DRAFTSMITH_API_KEY"
API_KEY_HELP = f"bearer token of that server [default: {VARIABLE} of the environment]"
MOST_TRIES = 4
# A server of ours waits longer for the next request than clients and proxies keep a connection (5 s
# to 60 s): the client closes first, and no request meets a connection that is being closed.
KEEP_ALIVE_S = 75


def known_key(api_key: str | None) -> str | None:
    """The key that is given, else that of the environment; None without both."""
    return api_key or os.environ.get(VARIABLE) or None


def bearer(api_key: str | None) -> dict[str, str]:
    """Header of a request with the key; {} without one."""
    key = known_key(api_key)
    return {} if key is None else {"authorization": f"Bearer {key}"}


def accepted_keys(given: Sequence[str] | None) -> tuple[str, ...]:
    """Keys that open a server; () for one that is open to all."""
    key = known_key(None)
    return tuple(given or ([] if key is None else [key]))


def with_key(api_key: str | None) -> dict[str, str]:
    """Environment of a child process that is to have the key."""
    return dict(os.environ) if api_key is None else os.environ | {VARIABLE: api_key}


def base_of(url: str, option: str = "url") -> str:
    """Address of the server that an option names, without the path of its API."""
    import httpx  # late: it would delay --help

    base = url.rstrip("/").removesuffix("/v1")
    try:
        parsed = urlsplit(base)
        is_server = parsed.scheme in ("http", "https") and bool(httpx.URL(base).host)
        is_server = is_server and parsed.port != 0
    except (ValueError, httpx.InvalidURL):
        is_server = False
    if not is_server:
        raise UserError(
            f"option {option!r} is {url!r}, which names no server; give its URL, such as "
            "http://127.0.0.1:8000"
        )
    return base


def message_of(answer: bytes) -> str:
    """Message of an error, in OpenAI's form or another."""
    try:
        body = json.loads(answer)
    except ValueError:
        return answer[:200].decode(errors="replace")
    error = body.get("error", body) if isinstance(body, dict) else body
    return str(error.get("message", error) if isinstance(error, dict) else error)[:300]


class Attempt:
    """One try of a request: whether its connection was opened for it (httpcore's trace)."""

    def __init__(self) -> None:
        self.is_new = False

    def saw(self, event: str, info: Any) -> None:
        self.is_new |= event.startswith("connection.connect")

    async def saw_async(self, event: str, info: Any) -> None:
        self.saw(event, info)


def is_closed(error: Exception) -> bool:
    """True for the error of a connection that the server has closed."""
    import httpx  # late: it would delay --help

    return isinstance(error, (httpx.RemoteProtocolError, httpx.ReadError, httpx.WriteError))


def remedy_of(error: Exception) -> str:
    """Remedy of a failed request, where `timeout_s` is an option."""
    import httpx  # late: it would delay --help

    is_late = isinstance(error, httpx.ReadTimeout)
    return "raise timeout_s" if is_late else "is the server still running?"


def send(
    send_once: Callable[[httpx.Request], httpx.Response], request: httpx.Request
) -> httpx.Response:
    """Response to a request whose body is in memory.

    Raises:
        httpx.HTTPError: as `send_once` does, of the last try.
    """
    for _ in range(MOST_TRIES - 1):
        attempt = Attempt()
        request.extensions["trace"] = attempt.saw
        try:
            return send_once(request)
        except Exception as error:
            if attempt.is_new or not is_closed(error):
                raise
    return send_once(request)


async def send_async(
    send_once: Callable[[httpx.Request], Awaitable[httpx.Response]], request: httpx.Request
) -> httpx.Response:
    """As `send`, for an asynchronous client."""
    for _ in range(MOST_TRIES - 1):
        attempt = Attempt()
        request.extensions["trace"] = attempt.saw_async
        try:
            return await send_once(request)
        except Exception as error:
            if attempt.is_new or not is_closed(error):
                raise
    return await send_once(request)


COUNTER = "vllm:spec_decode_num_{}_total"  # of drafts, in vLLM's metrics and in ours
Labels = tuple[tuple[str, str], ...]


@dataclass(frozen=True)
class Scrape:
    gauges: dict[str, dict[Labels, float]]
    # buckets, sums and counts of histograms are counters, too
    counters: dict[str, dict[Labels, float]]

    def total(self, name: str, **labels: str) -> float:
        """Sum over all samples that carry `labels`; 0 where there is none."""
        wanted = labels.items()
        return sum(
            value for found, value in self._of(name).items() if wanted <= dict(found).items()
        )

    def by(self, name: str, label: str, **labels: str) -> dict[str, float]:
        """Sums by the values of `label`."""
        values = {dict(found).get(label, "") for found in self._of(name)}
        return {value: self.total(name, **{label: value}, **labels) for value in sorted(values)}

    def has(self, name: str) -> bool:
        return bool(self._of(name))

    def _of(self, name: str) -> dict[Labels, float]:
        return self.counters.get(name) or self.gauges.get(name) or {}

    def since(self, earlier: Scrape) -> Scrape:
        """Counters since `earlier`; gauges as they are now."""
        counters = {
            name: {
                labels: value - earlier.counters.get(name, {}).get(labels, 0.0)
                for labels, value in samples.items()
            }
            for name, samples in self.counters.items()
        }
        if any(value < 0 for samples in counters.values() for value in samples.values()):
            raise UserError("the server was restarted meanwhile; run the command again")
        return Scrape(self.gauges, counters)


def parse(text: str) -> Scrape:
    from prometheus_client.parser import text_string_to_metric_families  # late, as httpx

    gauges: dict[str, dict[Labels, float]] = {}
    counters: dict[str, dict[Labels, float]] = {}
    try:
        for family in text_string_to_metric_families(text):
            kept = counters if family.type in ("counter", "histogram") else gauges
            for sample in family.samples:
                kept.setdefault(sample.name, {})[tuple(sorted(sample.labels.items()))] = (
                    sample.value
                )
    except ValueError as error:
        raise UserError(
            f"/metrics is no Prometheus text ({str(error)[:60]}); give the URL of a draftsmith "
            "server"
        ) from error
    return Scrape(gauges, counters)
