"""Tools that a request offers, and pieces of an answer that calls them. Torch-free."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

# Of a tool's name: OpenAI's letters, and what names of tool servers hold besides.
NAME_LETTERS, LONGEST_NAME = "A-Za-z0-9_.:/-", 128


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
