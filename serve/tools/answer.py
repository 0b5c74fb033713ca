"""Reasoning, text and calls of an answer that comes in pieces. Torch-free."""

from __future__ import annotations

from collections.abc import Collection
from typing import NamedTuple

from draftsmith.serve.tools.call_format import CallFormat
from draftsmith.serve.tools.calls import AnswerPiece, CallPiece
from draftsmith.serve.tools.reasoning import ReasoningFormat, ReasoningSplit, Thinking
from draftsmith.serve.tools.scanner import CallScanner


class AnswerForm(NamedTuple):
    """Formats in which the answers to one request are read."""

    calls: CallFormat | None = None  # None: whatever looks like a call is text
    names: Collection[str] = ()  # of the tools
    certain: bool = False  # see `CallScanner`
    reasoning: ReasoningFormat | None = None
    thinking: Thinking = Thinking.MAYBE
    continues: bool = False  # the prompt ends with the answer's beginning

    @property
    def is_text(self) -> bool:
        """True where an answer is its text, whatever stands in it."""
        return self.calls is None and self.reasoning is None

    def parser(self) -> AnswerParser:
        return AnswerParser(self)


class AnswerParser:
    """The sum of the pieces depends on the text alone."""

    def __init__(self, form: AnswerForm):
        self._split = (
            None
            if form.reasoning is None
            else ReasoningSplit(form.reasoning, form.thinking, begun=form.continues)
        )
        self._calls = (
            None
            if form.calls is None
            else CallScanner(form.calls, form.names, certain=form.certain)
        )

    @property
    def num_calls(self) -> int:
        """Number of calls so far."""
        return 0 if self._calls is None else self._calls.num_calls

    def push(self, text: str) -> AnswerPiece:
        piece = AnswerPiece(content=text) if self._split is None else self._split.push(text)
        return piece if self._calls is None else _after(piece, self._calls.push(piece.content))

    def finish(self) -> AnswerPiece:
        piece = AnswerPiece() if self._split is None else self._split.finish()
        if self._calls is None:
            return piece
        return _after(piece, joined([self._calls.push(piece.content), self._calls.finish()]))


def _after(before: AnswerPiece, piece: AnswerPiece) -> AnswerPiece:
    return piece._replace(reasoning=before.reasoning)


def joined(pieces: list[AnswerPiece]) -> AnswerPiece:
    """Several pieces as one; parts of one call are put together."""
    calls: dict[int, list[str]] = {}
    names: dict[int, str | None] = {}
    for call in (call for piece in pieces for call in piece.calls):
        calls.setdefault(call.index, []).append(call.arguments)
        names[call.index] = names.get(call.index) or call.name
    return AnswerPiece(
        content="".join(piece.content for piece in pieces),
        reasoning="".join(piece.reasoning for piece in pieces),
        calls=tuple(
            CallPiece(index, names[index], "".join(parts)) for index, parts in calls.items()
        ),
    )
