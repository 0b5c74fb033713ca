"""Tool calls in a text that comes in pieces. Torch-free."""

from __future__ import annotations

from collections.abc import Collection

from draftsmith.serve.tools.call_format import CallFormat, CallText, Found, partial
from draftsmith.serve.tools.calls import AnswerPiece, CallPiece


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
        self._content: list[str] = []
        self._calls: list[CallPiece] = []

    def push(self, text: str) -> AnswerPiece:
        self._text.text += text
        self._scan()
        return self._piece()

    def finish(self) -> AnswerPiece:
        self._text.final = True
        self._scan()
        if self._given is None:
            self._write(self._text.cut(len(self._text.text)))
        if not self._behind_call:
            self._content.append(self._held)
        self._held = ""
        return self._piece()

    def _piece(self) -> AnswerPiece:
        piece = AnswerPiece(content="".join(self._content), calls=tuple(self._calls))
        self._content, self._calls = [], []
        return piece

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
                self._calls.append(CallPiece(self.num_calls, call.name, call.arguments))
            else:
                rest = call.arguments[self._given[1] :]
                self._calls.append(CallPiece(self.num_calls, None, rest))
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
            self._calls.append(CallPiece(self.num_calls, name, arguments[given:]))
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
        self._content.append(kept)
        self._held = whole[len(kept) :]
