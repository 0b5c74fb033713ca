"""JSON in text that is still being written: where a value ends, and its members as they stand.
Torch-free."""

from __future__ import annotations

import json
import re

from draftsmith.serve.tools.calls import Call

_MARKS = re.compile(r'["\\{}\[\]]')
_SPACE = re.compile(r"[ \t\n\r]*")
_decode = json.JSONDecoder().raw_decode
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


def members(text: str) -> dict[str, str] | None:
    """Members of a JSON object, each value as it is written; None for what is no valid object."""
    try:
        if not isinstance(json.loads(text), dict):
            return None
    except (ValueError, RecursionError):
        return None
    found: dict[str, str] = {}
    at = skip_space(text, text.index("{") + 1)
    while text[at] != "}":
        key, at = _decode(text, at)
        begin = skip_space(text, skip_space(text, at) + 1)  # behind the colon
        _, end = _decode(text, begin)
        found[key] = text[begin:end]
        at = skip_space(text, end)
        at = skip_space(text, at + 1) if text[at] == "," else at
    return found


def read_call(text: str, *, bare: bool = False) -> Call | None:
    """Call of an object with a name and arguments; None where it is none. One without arguments has
    empty ones, unless it is `bare`: then nothing else distinguishes it from other JSON."""
    parts = members(text)
    if parts is None or not parts.get("name", "").startswith('"'):
        return None
    given = [parts[key] for key in ARGUMENTS if key in parts]
    if len(given) > 1 or (bare and not given) or not all(raw.startswith("{") for raw in given):
        return None
    name = json.loads(parts["name"])
    return Call(name, given[0] if given else "{}") if name else None
