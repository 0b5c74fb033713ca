"""JSON in text that is still being written: where a value ends, and its members as they stand.
Torch-free."""

from __future__ import annotations

import json
import re

from draftsmith.serve.tools.calls import ToolCallText

_MARKS = re.compile(r'["\\{}\[\]]')
_SPACE = re.compile(r"[ \t\n\r]*")


def _no_json(written: str) -> None:
    raise ValueError(f"{written} is no number of JSON")


# Numbers are not read: they may be larger than Python's.
_decode = json.JSONDecoder(parse_float=str, parse_int=str, parse_constant=_no_json).raw_decode
ARGUMENTS = ("arguments", "parameters")


class JsonSpan:
    """Search for the end of the object or array that begins at `begin` of a text that grows. Each
    character is read once."""

    def __init__(self, begin: int):
        self.begin, self.end = begin, -1  # -1: not there yet
        self._at, self._depth, self._quoted = begin, 0, False

    def advance(self, text: str) -> int:
        """Index behind the value; -1 as long as it is open."""
        while self.end < 0 and (mark := _MARKS.search(text, self._at)) is not None:
            self._at = mark.end()
            found = mark.group()
            if found == "\\":
                if self._at == len(text):
                    # What it escapes is still to come.
                    self._at -= 1
                    return -1
                self._at += 1
            elif found == '"':
                self._quoted = not self._quoted
            elif not self._quoted:
                self._depth += 1 if found in "{[" else -1
                if self._depth == 0:
                    self.end = self._at
        if self.end < 0:
            self._at = max(self._at, len(text))
        return self.end


def skip_space(text: str, at: int) -> int:
    match = _SPACE.match(text, at)
    assert match is not None
    return match.end()


def _parts(text: str, kind: type) -> list[tuple[str, str]] | None:
    """Key and text of each value of a JSON object, or "" and text of each of an array."""
    at = skip_space(text, 0)
    try:
        whole, end = _decode(text, at)
    except (ValueError, RecursionError):
        return None
    if not isinstance(whole, kind) or skip_space(text, end) < len(text):
        return None
    found, at = list[tuple[str, str]](), skip_space(text, at + 1)
    while at < end - 1:
        key = ""
        if kind is dict:
            key, at = _decode(text, at)
            at = skip_space(text, skip_space(text, at) + 1)  # behind the colon
        _, behind = _decode(text, at)
        found.append((key, text[at:behind]))
        at = skip_space(text, behind)
        at = skip_space(text, at + 1) if text[at] == "," else at
    return found


def members(text: str) -> dict[str, str] | None:
    """Members of a JSON object, each value as it is written; None for what is no valid object."""
    parts = _parts(text, dict)
    return None if parts is None else dict(parts)


def items(text: str) -> list[str] | None:
    """Items of a JSON array, as they are written; None for what is no valid array."""
    parts = _parts(text, list)
    return None if parts is None else [item for _, item in parts]


def read_call(text: str, *, bare: bool = False) -> ToolCallText | None:
    """Call of an object with a name and arguments; None where it is none. One without arguments has
    empty ones, unless it is `bare`: then nothing else distinguishes it from other JSON."""
    parts = members(text)
    if parts is None or not parts.get("name", "").startswith('"'):
        return None
    given = [parts[key] for key in ARGUMENTS if key in parts]
    if len(given) > 1 or (bare and not given) or not all(raw.startswith("{") for raw in given):
        return None
    name = json.loads(parts["name"])
    if not name or any("\ud800" <= letter <= "\udfff" for letter in name):
        return None  # half a surrogate pair is no text
    return ToolCallText(name, given[0] if given else "{}")
