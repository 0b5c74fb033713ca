"""Interface of a format of tool calls: how a text is read and which texts a grammar allows.
Torch-free."""

from __future__ import annotations

import json
from abc import ABC, abstractmethod
from collections.abc import Collection, Sequence
from typing import NamedTuple, Protocol

from draftsmith.serve.tools.calls import ToolCallText
from draftsmith.serve.tools.json_text import JsonSpan

CALL_FORMATS = ("hermes", "llama3_json", "mistral")  # vLLM's names


class Mark(Protocol):
    """Markers as Lark's syntax has them: see `grammars.Marks`."""

    def __call__(self, marker: str) -> str: ...

    def head(self, rule: str, marker: str) -> str: ...


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


class CallFormat(ABC):
    """One way to write tool calls."""

    markers: tuple[str, ...]  # texts that a tokenizer may hold as one special token
    starts: tuple[str, ...]  # texts with which a call begins
    leading: bool = False  # calls stand at the beginning of an answer alone

    @abstractmethod
    def read(self, text: CallText) -> Found | None:
        """Calls at the beginning of the text, which is one of `starts`; None while more text may
        change what is found. With `text.final` it is decided."""

    def opened(self, text: CallText) -> OpenedCall | None:
        """The call at the beginning of the text whose arguments have begun, for answers whose
        grammar leaves nothing else."""
        return None

    @abstractmethod
    def calls(self, names: Sequence[str], mark: Mark, *, parallel: bool) -> str:
        """Lark rules of `calls`, one call or, if `parallel`, one and more; the arguments of call i
        are the rule `args_i`."""

    @abstractmethod
    def free(self, names: Sequence[str], mark: Mark, *, parallel: bool) -> str:
        """Lark rules of `free`: any text, with calls or without. The rules of `calls` come
        with them."""


def quoted(text: str) -> str:
    """A text as a string of Lark's syntax."""
    return json.dumps(text, ensure_ascii=False)


def choice(rule: str, count: int) -> str:
    return " | ".join(f"{rule}_{index}" for index in range(count))


def partial(text: str, starts: Collection[str]) -> int:
    """Length of the longest end of `text` that begins one of `starts`."""
    longest = min(len(text), max(map(len, starts)) - 1)
    for length in range(longest, 0, -1):
        if any(start.startswith(text[-length:]) for start in starts):
            return length
    return 0
