"""Values of a JSON text, each with its place: one a line, the elements of an array, or values one
after the other. Each is given before the next is read, so that a file may be of any size."""

from __future__ import annotations

import itertools
import json
from collections.abc import Iterator
from typing import Any, TextIO

from draftsmith.errors import UserError

Placed = tuple[str, Any]  # where it stands, value

PIECE = 1 << 20  # characters read at once
# Most characters of a value that the end of a piece can cut without cutting a text: "-Infinity".
MOST_CUT = 16
DECODER = json.JSONDecoder()


def read_values(text: TextIO, name: str) -> Iterator[Placed]:
    """Values of the text of the file `name`.

    Raises:
        UserError: one is not valid JSON.
    """
    number, line = _next_line(text, 0, PIECE)
    if not line:
        return
    try:
        value = json.loads(line)
    except (ValueError, RecursionError):
        # The first line of values that go over several, or a long one.
        yield from _Pieces(text, name, number, line).values()
        return
    second, after = _next_line(text, number)
    if not after and isinstance(value, list):
        for row, element in enumerate(value, start=1):
            yield f"row {row} of {name!r}", element
        return
    yield f"line {number} of {name!r}", value
    for at, line in enumerate(itertools.chain([after], text), start=second):
        if line.strip():
            where = f"line {at} of {name!r}"
            try:
                value = json.loads(line)
            except (ValueError, RecursionError) as error:
                raise _invalid(where, error) from error
            yield where, value


def begins_json(head: str, *, is_whole: bool) -> bool:
    """True where the head of a text, or all of it, is of a JSON text, which may be cut."""
    try:
        _, end = DECODER.raw_decode(head.lstrip())
    except json.JSONDecodeError as error:
        room = 0 if is_whole else MOST_CUT
        return error.pos + room >= len(head.strip()) or error.msg.startswith("Unterminated")
    except (ValueError, RecursionError):
        return True  # to be refused as such
    return head.lstrip()[end:].lstrip(" \t")[:1] in ("", "\n", ",", "{", "[")


def _next_line(text: TextIO, number: int, most: int = -1) -> tuple[int, str]:
    """Next line that is not blank, with its number; "" at the end."""
    for line in iter(lambda: text.readline(most), ""):
        number += 1
        if line.strip():
            return number, line
    return number, ""


def _invalid(where: str, error: Exception) -> UserError:
    reason = getattr(error, "msg", None) or str(error)
    return UserError(
        f"{where} is not valid JSON ({reason}); mend or delete it, or name the file .txt where its "
        "lines are plain prompts and the first is no JSON"
    )


class _Pieces:
    """A JSON text that is read piece by piece."""

    def __init__(self, text: TextIO, name: str, line: int, begin: str):
        self.text, self.name = text, name
        self.piece, self.at = begin, 0
        self.line = line  # number of the piece's first

    def values(self) -> Iterator[Placed]:
        numbers = itertools.count(1)
        while begin := self._next():
            for value in self._elements() if begin == "[" else [self._value()]:
                yield f"row {next(numbers)} of {self.name!r}", value

    def _elements(self) -> Iterator[Any]:
        """Elements of the array that begins here."""
        self.at += 1
        if self._next() == "]":
            self.at += 1
            return
        after = ","
        while after == ",":
            self._next()
            yield self._value()
            after = self._next()
            if after not in ("]", ","):
                missing = ValueError("Expecting ',' or ']' of its array")
                raise _invalid(self._where(self.at), missing)
            self.at += 1

    def _next(self) -> str:
        """Next character that is no space, where reading goes on; "" at the end."""
        while True:
            while self.at < len(self.piece):
                if not self.piece[self.at].isspace():
                    return self.piece[self.at]
                self.at += 1
            if not self._more():
                return ""

    def _value(self) -> Any:
        while True:
            try:
                value, self.at = DECODER.raw_decode(self.piece, self.at)
                return value
            except json.JSONDecodeError as error:
                is_cut = error.pos + MOST_CUT >= len(self.piece) or self.piece[error.pos] == '"'
                if not is_cut or not self._more():
                    raise _invalid(self._where(error.pos), error) from error
            except (ValueError, RecursionError) as error:
                raise _invalid(self._where(self.at), error) from error

    def _more(self) -> bool:
        """Reads as much again as is left, at least a piece; False at the end."""
        left = self.piece[self.at :]
        more = self.text.read(max(PIECE, len(left)))
        if more:
            self.line += self.piece.count("\n", 0, self.at)
            self.piece, self.at = left + more, 0
        return bool(more)

    def _where(self, at: int) -> str:
        return f"line {self.line + self.piece.count(chr(10), 0, at)} of {self.name!r}"
