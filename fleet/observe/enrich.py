"""Fields that the proxy adds to a request, and their removal from the answer.

Nothing is added unless the probe has shown for this server, endpoint and form of answer that the
removal gives the bytes of an answer without them. A request that asks for any such field itself, or
for a form of answer in which they change other parts, is sent as it is. The removal leaves every
other byte as it is: members are taken out or set to null where they stand.
"""

from __future__ import annotations

import json
import logging
import re
import threading
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import httpx

from draftsmith.client import bearer
from draftsmith.fleet.observe.endpoints import ENDPOINTS, Body, Endpoint, events

# Members of an answer, and of its choices, that the fields bring.
BROUGHT = ("token_ids", "prompt_token_ids", "logprobs")
# Fields of a request that the added ones would meet in the answer.
MEETING = (
    "best_of", "echo", "logprobs", "prompt_logprobs", "return_prompt_text", "return_token_ids",
    "return_tokens_as_token_ids", "top_logprobs", "use_beam_search",
)  # fmt: skip
EVENT = re.compile(rb".*?\r?\n\r?\n", re.DOTALL)
DATA = re.compile(rb"^data:[ ]?(\{.*\})", re.MULTILINE)
SPACE = re.compile(r"[ \t\r\n]*")
_decode = json.JSONDecoder().raw_decode


class Form(NamedTuple):
    """Kind of answer that is probed on its own."""

    path: str
    is_stream: bool


class Restoring(NamedTuple):
    """Proven way back to the bytes of a plain answer."""

    fields: Mapping[str, Any]  # of the request
    ways: Mapping[str, str]  # member -> "null" or "cut", as a plain answer has it

    @property
    def drops_empty(self) -> bool:
        """vLLM, which writes null for ids that are not asked for, sends a piece of a chat without
        content for the sake of its ids alone."""
        return self.ways.get("token_ids") == "null"


@dataclass
class Enrichment:
    """Forms of answers that may be enriched; the probe fills them in."""

    forms: dict[Form, Restoring] = field(default_factory=dict)

    def fields(self, endpoint: Endpoint, request: Body) -> dict[str, Any]:
        """Fields to add to a request; empty where it is to be sent as it is."""
        is_stream = bool(request.get("stream"))
        restoring = self.forms.get(Form(endpoint.path, is_stream))
        given = [request.get(name) for name in MEETING]
        meets = any(one is not None and one is not False for one in given)
        several = request.get("n") not in (None, 1) or _has_several_prompts(request.get("prompt"))
        parsed = is_stream and bool(request.get("tools"))
        if restoring is None or meets or several or parsed:
            return {}
        return dict(restoring.fields)

    def editing(self, endpoint: Endpoint, added: frozenset[str], is_stream: bool) -> Editing | None:
        restoring = self.forms.get(Form(endpoint.path, is_stream))
        return Editing(restoring, is_stream=is_stream) if restoring and added else None


def _has_several_prompts(prompt: Any) -> bool:
    return isinstance(prompt, list) and len(prompt) > 1 and not isinstance(prompt[0], int)


class Editing:
    """Removal of what was added from one answer, as its bytes come."""

    def __init__(self, restoring: Restoring, *, is_stream: bool):
        self.restoring, self.is_stream = restoring, is_stream
        self._waiting = b""

    def whole(self, data: bytes) -> bytes:
        return self._restored(data)

    def piece(self, data: bytes) -> bytes:
        """The events that `data` completes."""
        self._waiting += data
        done, end = [], 0
        for found in EVENT.finditer(self._waiting):
            done.append(self._event(found[0]))
            end = found.end()
        self._waiting = self._waiting[end:]
        return b"".join(done)

    def rest(self) -> bytes:
        """Rest of a stream at its end."""
        return self._event(self._waiting) if self._waiting else b""

    def _event(self, event: bytes) -> bytes:
        found = DATA.findall(event)
        if len(found) != 1:
            return event
        if self.restoring.drops_empty and is_for_ids_alone(found[0]):
            return b""
        return event.replace(found[0], self._restored(found[0]))

    def _restored(self, data: bytes) -> bytes:
        try:
            return restored(data.decode(), self.restoring.ways).encode()
        except (IndexError, ValueError):
            return data  # no object: nothing was added to it


def restored(text: str, ways: Mapping[str, str]) -> str:
    """An answer or a piece of one without what the fields bring."""

    def choose(one: SpanMember) -> str | None:
        if one.name not in BROUGHT:
            return None
        way = ways.get(one.name, "cut")
        # A null stays where nulls are written.
        return None if way == "null" and text[one.value : one.end] == "null" else way

    edits: list[Edit] = list(edits_of(text, 0, choose))
    for one in members(text, 0):
        if one.name == "choices" and text[one.value] == "[":
            for choice in items(text, one.value):
                edits += edits_of(text, choice, choose)
    return applied(text, edits)


def is_for_ids_alone(data: bytes) -> bool:
    """True for a piece of a chat with an empty delta that ends nothing."""
    return b'"delta":{}' in data and b'"finish_reason":null' in data


class SpanMember(NamedTuple):
    """One member of an object, as places in the text."""

    name: str
    begin: int  # of its name
    value: int
    end: int


class Edit(NamedTuple):
    begin: int
    end: int
    text: str


def members(text: str, at: int) -> Iterator[SpanMember]:
    """Members of the object at `at`. Raises `ValueError` where there is none."""
    at = _past(text, at, "{")
    while text[at] != "}":
        name, end = _decode(text, at)
        value = _past(text, _skip(text, end), ":")
        _, end = _decode(text, value)
        after = _skip(text, end)
        yield SpanMember(name, at, value, end)
        if text[after] != ",":
            return
        at = _skip(text, after + 1)


def items(text: str, at: int) -> Iterator[int]:
    """Places of the items of the array at `at`."""
    at = _past(text, at, "[")
    while text[at] != "]":
        yield at
        _, end = _decode(text, at)
        end = _skip(text, end)
        if text[end] != ",":
            return
        at = _skip(text, end + 1)


def edits_of(text: str, at: int, choose: Callable[[SpanMember], str | None]) -> Iterator[Edit]:
    """Edits of an object's members: `choose` gives "null", "cut", or None for those that stay."""
    found = list(members(text, at))
    chosen = [choose(one) for one in found]
    is_first = True  # no member before it stays
    for index, one in enumerate(found):
        if chosen[index] == "null":
            yield Edit(one.value, one.end, "null")
        if chosen[index] != "cut":
            is_first = False
        elif not is_first:
            yield Edit(found[index - 1].end, one.end, "")
        else:
            end = found[index + 1].begin if index + 1 < len(found) else one.end
            yield Edit(one.begin, end, "")


def applied(text: str, edits: list[Edit]) -> str:
    for edit in sorted(edits, reverse=True):
        text = text[: edit.begin] + edit.text + text[edit.end :]
    return text


def _skip(text: str, at: int) -> int:
    found = SPACE.match(text, at)
    assert found is not None  # it matches nothing, too
    return found.end()


def _past(text: str, at: int, mark: str) -> int:
    if text[at : at + 1] != mark:
        raise ValueError(f"no {mark!r} at {at}")
    return _skip(text, at + 1)


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
