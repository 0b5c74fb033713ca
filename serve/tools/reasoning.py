"""Reasoning before an answer, between two markers. Torch-free."""

from __future__ import annotations

import enum
from typing import NamedTuple

from draftsmith.serve.tools.call_format import partial
from draftsmith.serve.tools.calls import AnswerPiece


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
