"""Tools, pieces of an answer that calls them, and the interface of a format of calls: how a text is
read and which texts a grammar allows. JSON in it is still being written: where a value ends, and
its members as they stand. Torch-free."""

from __future__ import annotations

import json
import re
from abc import ABC, abstractmethod
from collections.abc import Collection, Mapping, Sequence
from typing import Any, NamedTuple

from draftsmith.chats import ARGUMENTS

CALL_FORMATS = ("hermes", "llama3_json", "mistral")  # vLLM's names
# Of a tool's name: OpenAI's letters, and what names of tool servers hold besides.
NAME_LETTERS, LONGEST_NAME = "A-Za-z0-9_.:/-", 128
_MARKS = re.compile(r'["\\{}\[\]]')
_SPACE = re.compile(r"[ \t\n\r]*")


class Tool(NamedTuple):
    """A function that the model may call."""

    name: str
    parameters: Mapping[str, Any]  # JSON schema of its arguments, an object
    strict: bool = False  # arguments hold to the schema even where a call is not enforced


class ToolCallText(NamedTuple):
    name: str
    arguments: str  # a JSON object, as the model wrote it


class CallPiece(NamedTuple):
    """A call of an answer, or a part of its arguments."""

    index: int  # type: ignore[assignment]  # in place of the tuple's method
    name: str | None  # of the call's first piece; None for those that go on with it
    arguments: str


class AnswerPiece(NamedTuple):
    """A part of an answer. The answer is the sum of its pieces, however they are cut."""

    content: str = ""
    reasoning: str = ""
    calls: tuple[CallPiece, ...] = ()


class Found(NamedTuple):
    """Calls that end before `end` of the text; none where what begins like a call is none."""

    calls: Sequence[ToolCallText]
    end: int


class OpenedCall(NamedTuple):
    """A call whose arguments are still being written: `begin` is where they begin."""

    name: str
    begin: int


class CallText:
    """Text of an answer from a possible call on, as far as it has come."""

    def __init__(self, names: Collection[str]):
        self.text, self.final = "", False
        self.names = names  # of the request's tools
        self._spans: dict[int, JsonSpan] = {}

    def object_end(self, begin: int) -> int:
        """Index behind the JSON value that begins there; -1 as long as it is open."""
        return self._spans.setdefault(begin, JsonSpan(begin)).advance(self.text)

    def cut(self, count: int) -> str:
        """Takes the first `count` characters out."""
        head, self.text = self.text[:count], self.text[count:]
        self._spans.clear()
        return head


ANY = "ANY: /(?s:.*)/\n"


class Marks:
    """Markers in Lark's syntax. `added` are the ids of the tokenizer's added tokens: as llguidance
    has it no text spells most of these, so that a marker is its token or its characters."""

    def __init__(self, added: Mapping[str, int]):
        self.added = added

    def token(self, marker: str) -> str:
        """The marker's own token; "" where it has none."""
        return f"<[{self.added[marker]}]>" if marker in self.added else ""

    def __call__(self, marker: str) -> str:
        token = self.token(marker)
        return f"({quoted(marker)} | {token})" if token else quoted(marker)

    def head(self, rule: str, marker: str) -> str:
        """Rules of a text that ends with its first `marker`."""
        token = self.token(marker)
        rules = f"{rule}: {rule}_spelled{f' | ANY {token}' if token else ''}\n"
        return rules + f"{rule}_spelled[suffix={quoted(marker)}]: ANY\n"


class CallFormat(ABC):
    """One way to write tool calls."""

    signs: tuple[str, ...]  # texts of a chat template that show the format
    others: tuple[str, ...] = ()  # texts that show another one, which has `signs` too
    markers: tuple[str, ...]  # texts that a tokenizer may hold as one special token
    starts: tuple[str, ...]  # texts with which a call begins
    leading: bool = False  # calls stand at the beginning of an answer alone

    @abstractmethod
    def read(self, text: CallText) -> Found | None:
        """Calls at the beginning of the text, which is one of `starts`; None while more text may
        change what is found. With `text.final` it is decided."""

    @abstractmethod
    def opened(self, text: CallText) -> OpenedCall | None:
        """The call at the beginning of the text whose arguments have begun, for answers whose
        grammar leaves nothing else."""

    @abstractmethod
    def calls(self, names: Sequence[str], mark: Marks, *, parallel: bool) -> str:
        """Lark rules of `calls`, one call or, if `parallel`, one and more; the arguments of call i
        are the rule `args_i`."""

    @abstractmethod
    def free(self, names: Sequence[str], mark: Marks, *, parallel: bool) -> str:
        """Lark rules of `free`: any text, with calls or without. The rules of `calls` come
        with them."""


def quoted(text: str) -> str:
    """A text as a string of Lark's syntax."""
    return json.dumps(text, ensure_ascii=False)


def partial(text: str, starts: Collection[str]) -> int:
    """Length of the longest end of `text` that begins one of `starts`."""
    longest = min(len(text), max(map(len, starts)) - 1)
    for length in range(longest, 0, -1):
        if any(start.startswith(text[-length:]) for start in starts):
            return length
    return 0


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


def _no_json(written: str) -> None:
    raise ValueError(f"{written} is no number of JSON")


# Numbers are not read: they may be larger than Python's.
_decode = json.JSONDecoder(parse_float=str, parse_int=str, parse_constant=_no_json).raw_decode


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
