"""Edits of JSON text that leave every other byte as it is: members are taken out or set to null
where they stand, and nothing is written anew."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator
from typing import NamedTuple

SPACE = re.compile(r"[ \t\r\n]*")
_decode = json.JSONDecoder().raw_decode


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
