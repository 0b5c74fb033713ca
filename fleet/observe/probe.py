"""Proof on the server itself that what enrichment adds can be taken out again.

Each form of answer is requested twice, one token long and greedy: plain and enriched. Where the
enriched answer without its additions is the plain one byte by byte, numbers and the answer's id
apart, which differ between any two answers, the form may be enriched.
"""

from __future__ import annotations

import json
import logging
import re
import threading
from collections.abc import Iterator
from typing import Any

import httpx

from draftsmith.client import bearer
from draftsmith.fleet.observe.endpoints import ENDPOINTS, Endpoint, events
from draftsmith.fleet.observe.enrich import BROUGHT, Editing, Enrichment, Form, Restoring

logger = logging.getLogger("draftsmith.observe")

NUMBER = re.compile(rb"-?\d+(\.\d+)?([eE][-+]?\d+)?")
IDS: dict[str, Any] = {"return_token_ids": True}
TIMEOUT_S = 60.0
AGAIN_S = 5.0
PROMPTS: dict[str, dict[str, Any]] = {
    "/v1/completions": {"prompt": "Hello"},
    "/v1/chat/completions": {"messages": [{"role": "user", "content": "Hello"}]},
}


class EngineProbe:
    """Fills `enrichment` on a thread of its own, as soon as the server answers.

    Args:
        top: logprobs to add, None for token ids alone.
    """

    def __init__(self, http: httpx.Client, enrichment: Enrichment, *, top: int | None):
        self.http, self.enrichment, self.top = http, enrichment, top
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, name="observe-probe", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def close(self) -> None:
        self._stop.set()
        self._thread.join()
        self.http.close()

    def _run(self) -> None:
        while not self._stop.is_set():
            try:
                self.look()
                return
            except (httpx.HTTPError, KeyError, IndexError, TypeError, ValueError) as error:
                logger.info("nothing is enriched until the server answers (%s)", error)
                self._stop.wait(AGAIN_S)

    def look(self) -> None:
        """Probes every form. Raises `httpx.HTTPError` while the server does not answer."""
        model = self.http.get("/v1/models").raise_for_status().json()["data"][0]["id"]
        for endpoint in ENDPOINTS.values():
            for is_stream in (False, True):
                form = Form(endpoint.path, is_stream)
                found = self._proven(endpoint, model, is_stream)
                if found is not None:
                    self.enrichment.forms[form] = found
                shown = ", ".join(found.fields) if found else "nothing"
                kind = "streams" if is_stream else "answers"
                logger.info("%s of %s are enriched by %s", kind, endpoint.path, shown)

    def _proven(self, endpoint: Endpoint, model: str, is_stream: bool) -> Restoring | None:
        request = {
            "model": model,
            "max_tokens": 1,
            "temperature": 0,
            "stream": is_stream,
            **PROMPTS[endpoint.path],
        }
        plain = self._ask(endpoint, request)
        if plain is None:
            return None
        named = set(names(plain, is_stream=is_stream))
        ways = {name: "null" if name in named else "cut" for name in BROUGHT}
        for fields in self._choices(endpoint):
            enriched = self._ask(endpoint, request | fields)
            if enriched is None:
                continue
            restoring = Restoring(fields, ways)
            has_ids = b'"token_ids"' in enriched.replace(b'"token_ids":null', b"")
            if has_ids and masked(without(restoring, enriched, is_stream), is_stream) == masked(
                plain, is_stream
            ):
                return restoring
        return None

    def _choices(self, endpoint: Endpoint) -> list[dict[str, Any]]:
        if self.top is None:
            return [IDS]
        by_id = {"return_tokens_as_token_ids": True}
        return [IDS | by_id | endpoint.logprob_fields(self.top), IDS]

    def _ask(self, endpoint: Endpoint, request: dict[str, Any]) -> bytes | None:
        response = self.http.post(endpoint.path, json=request)
        return response.content if response.status_code == 200 else None


def without(restoring: Restoring, data: bytes, is_stream: bool) -> bytes:
    editing = Editing(restoring, is_stream=is_stream)
    return editing.piece(data) + editing.rest() if is_stream else editing.whole(data)


def bodies(data: bytes, is_stream: bool) -> list[dict[str, Any]]:
    return list(events(data)) if is_stream else [json.loads(data)]


def names(data: bytes, *, is_stream: bool) -> Iterator[str]:
    """Names of the members of an answer and of its choices."""
    for body in bodies(data, is_stream):
        yield from body
        for choice in body.get("choices") or ():
            yield from choice


def masked(data: bytes, is_stream: bool) -> bytes:
    for body in bodies(data, is_stream):
        if name := str(body.get("id") or ""):
            data = data.replace(name.encode(), b"ID")
    return NUMBER.sub(b"0", data)


def client(url: str, api_key: str | None) -> httpx.Client:
    headers = {"accept-encoding": "identity"} | bearer(api_key)
    return httpx.Client(base_url=url, headers=headers, timeout=TIMEOUT_S)
