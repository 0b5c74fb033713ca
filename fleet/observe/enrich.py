"""Fields that the proxy adds to a request, and their removal from the answer.

Nothing is added unless the probe has shown for this server, endpoint and form of answer that the
removal gives the bytes of an answer without them. A request that asks for any such field itself, or
for a form of answer in which they change other parts, is sent as it is. The removal leaves every
other byte as it is: members are taken out or set to null where they stand.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from draftsmith.fleet.observe.endpoints import Body, Endpoint

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
