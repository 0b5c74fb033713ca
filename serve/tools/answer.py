"""Reasoning, between two markers, text and calls of an answer that comes in pieces. Torch-free."""

from __future__ import annotations

import enum
from collections.abc import Collection
from typing import NamedTuple

from draftsmith.serve.tools.call_format import (
    AnswerPiece,
    CallFormat,
    CallPiece,
    CallText,
    Found,
    partial,
)


class ReasoningFormat(NamedTuple):
    begin: str
    end: str


class Thinking(enum.Enum):
    """State in which a prompt leaves the answer."""

    MAYBE = "maybe"  # the answer may begin with reasoning
    OPEN = "open"  # the prompt ends with the begin marker
    DONE = "done"  # the prompt ends with reasoning that has ended


THINK = ReasoningFormat("<think>", "</think>")
REASONING_FORMATS = {
    "deepseek_r1": THINK,
    "glm45": THINK,
    "qwen3": THINK,
    "mistral": ReasoningFormat("[THINK]", "[/THINK]"),
}


def reasoning_format_of(template: str) -> ReasoningFormat | None:
    """Format whose end marker a chat template holds."""
    return next((one for one in REASONING_FORMATS.values() if one.end in template), None)


def thinking_after(prompt: str, format: ReasoningFormat, continued: str = "") -> Thinking:
    """State behind a prompt that may end with a message that is `continued`: of its markers the
    last one counts."""
    begin, end = (continued.rfind(marker) for marker in format)
    if begin != end:
        return Thinking.OPEN if begin > end else Thinking.DONE
    text = prompt.rstrip().removesuffix(continued.strip()).rstrip()
    if text.endswith(format.end):
        return Thinking.DONE
    return Thinking.OPEN if text.endswith(format.begin) else Thinking.MAYBE


class ReasoningSplit:
    """Parts a text that comes in pieces into reasoning and what follows. Line ends beside a marker
    belong to the format and are left out."""

    def __init__(self, format: ReasoningFormat, thinking: Thinking, *, begun: bool = False):
        self.format, self.state = format, thinking
        self._text = ""
        self._begun = begun  # something but line ends was given since the last marker

    def push(self, text: str) -> AnswerPiece:
        """Content in it is what follows the reasoning."""
        self._text += text
        if self.state is Thinking.MAYBE:
            stripped = self._text.lstrip()
            if stripped.startswith(self.format.begin):
                self.state, self._text = Thinking.OPEN, stripped[len(self.format.begin) :]
                self._begun = False
            elif self.format.begin.startswith(stripped):
                return AnswerPiece()
            else:
                self.state, self._begun = Thinking.DONE, True
        reasoning = self._reasoning() if self.state is Thinking.OPEN else ""
        if self.state is Thinking.OPEN:
            return AnswerPiece(reasoning=reasoning)
        return AnswerPiece(reasoning=reasoning, content=self._unspaced(len(self._text)))

    def _reasoning(self) -> str:
        at = self._text.find(self.format.end)
        if at < 0:
            known = len(self._text) - partial(self._text, (self.format.end,))
            return self._unspaced(len(self._text[:known].rstrip("\n")))
        given = self._unspaced(at).rstrip("\n")
        self._text = self._text[len(self.format.end) :]
        self.state, self._begun = Thinking.DONE, False
        return given

    def _unspaced(self, count: int) -> str:
        """Takes out the first characters, without the line ends behind a marker."""
        text, self._text = self._text[:count], self._text[count:]
        if not self._begun:
            text = text.lstrip("\n")
            self._begun = bool(text)
        return text

    def finish(self) -> AnswerPiece:
        text, self._text = self._text, ""
        if self.state is Thinking.OPEN:
            return AnswerPiece(reasoning=text if self._begun else text.lstrip("\n"))
        return AnswerPiece(content=text)


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
        return joined(self.pieces(text))

    def finish(self) -> AnswerPiece:
        return joined(self.pieces("", last=True))

    def pieces(self, text: str, *, last: bool = False) -> list[AnswerPiece]:
        """Pieces in the order of the text, each of one kind; with `last` nothing follows it."""
        pieces = [AnswerPiece(content=text) if self._split is None else self._split.push(text)]
        if last and self._split is not None:
            pieces.append(self._split.finish())
        if self._calls is None:
            return pieces
        found: list[AnswerPiece] = []
        for piece in pieces:
            found += [AnswerPiece(reasoning=piece.reasoning), *self._calls.push(piece.content)]
        return [*found, *self._calls.finish()] if last else found


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


class CallScanner:
    """Parts a text into content and calls; what begins like a call and is none is content.

    Space beside a call belongs to the format and is left out. The sum of the pieces depends on the
    text alone.

    Args:
        names: of the request's tools.
        certain: a grammar leaves no text that begins like a call and is none, so that arguments are
            given while they are being written.
    """

    def __init__(self, format: CallFormat, names: Collection[str], *, certain: bool = False):
        self.format, self.certain = format, certain
        self.num_calls = 0
        self._text = CallText(names)
        self._held = ""  # space that may stand before a call
        self._behind_call = False
        self._leading = format.leading
        self._given: tuple[str, int] | None = None  # name and given arguments of an open call
        self._pieces: list[AnswerPiece] = []  # in the order of the text

    def push(self, text: str) -> list[AnswerPiece]:
        self._text.text += text
        self._scan()
        return self._taken()

    def finish(self) -> list[AnswerPiece]:
        self._text.final = True
        self._scan()
        if self._given is None:
            self._write(self._text.cut(len(self._text.text)))
        if not self._behind_call:
            self._pieces.append(AnswerPiece(content=self._held))
        self._held = ""
        return self._taken()

    def _taken(self) -> list[AnswerPiece]:
        pieces, self._pieces = self._pieces, []
        return pieces

    def _call(self, name: str | None, arguments: str) -> None:
        call = CallPiece(self.num_calls, name, arguments)
        self._pieces.append(AnswerPiece(calls=(call,)))

    def _scan(self) -> None:
        while self._to_call():
            found = self.format.read(self._text)
            if found is None or (self._given is not None and not found.calls):
                self._give_opened()
                return
            self._take(found)

    def _to_call(self) -> bool:
        """Gives out the content before a possible call; True when the text now begins with one."""
        if self._given is not None:
            return True
        text = self._text
        if self._leading:
            stripped = text.text.lstrip()
            if not stripped or any(
                start.startswith(stripped) and start != stripped for start in self.format.starts
            ):
                return False
            if stripped.startswith(self.format.starts):
                self._write(text.cut(len(text.text) - len(stripped)))
                return True
            self._leading = False
        if self.format.leading:
            self._write(text.cut(len(text.text)))
            return False
        places = [text.text.find(start) for start in self.format.starts]
        if found := [place for place in places if place >= 0]:
            self._write(text.cut(min(found)))
            return True
        self._write(text.cut(len(text.text) - partial(text.text, self.format.starts)))
        return False

    def _take(self, found: Found) -> None:
        self._leading = False
        if not found.calls:
            self._write(self._text.cut(found.end))
            return
        for call in found.calls:
            if self._given is None:
                self._call(call.name, call.arguments)
            else:
                self._call(None, call.arguments[self._given[1] :])
                self._given = None
            self.num_calls += 1
        self._text.cut(found.end)
        self._held, self._behind_call = "", True

    def _give_opened(self) -> None:
        """Give what is there of the arguments of a call that is being written."""
        opened = self.format.opened(self._text) if self.certain else None
        if opened is None:
            return
        end = self._text.object_end(opened.begin)
        arguments = self._text.text[opened.begin : end if end >= 0 else None]
        name, given = (opened.name, 0) if self._given is None else (None, self._given[1])
        if name is not None or len(arguments) > given:
            self._call(name, arguments[given:])
        self._held, self._given = "", (opened.name, len(arguments))

    def _write(self, text: str) -> None:
        """Content, of which space at its end waits for what follows."""
        if self._behind_call:
            text = text.lstrip()
        if not text:
            return
        self._behind_call = False
        whole = self._held + text
        kept = whole.rstrip()
        self._pieces.append(AnswerPiece(content=kept))
        self._held = whole[len(kept) :]
