"""Output items of a response, and the events of a stream that builds them."""

from __future__ import annotations

import uuid
from collections.abc import Callable
from typing import Any

from draftsmith.serve.tools.calls import AnswerPiece, CallPiece

Body = dict[str, Any]


class OutputItems:
    """Items in the order of their first piece, each done before the next begins.

    Args:
        new_call_id: makes the `call_id` of a call.
    """

    def __init__(self, new_call_id: Callable[[], str]):
        self.items: list[Body] = []
        self._new_call_id = new_call_id
        self._open = ""  # type of the last item, while it may still grow
        self._text = ""  # of the open item

    def push(self, piece: AnswerPiece) -> list[Body]:
        """Events of a piece."""
        events = []
        if piece.reasoning:
            events += self._write("reasoning", piece.reasoning)
        if piece.content:
            events += self._write("message", piece.content)
        for call in piece.calls:
            events += self._call(call)
        return events

    def finish(self, *, whole: bool) -> list[Body]:
        """Events of the end; `whole` is false for an answer that was cut off. An answer without
        anything is an empty message."""
        events = [] if self.items else self._begin("message")
        return [*events, *self._end("completed" if whole else "incomplete")]

    def _write(self, kind: str, text: str) -> list[Body]:
        events = [] if self._open == kind else [*self._end(), *self._begin(kind)]
        self._text += text
        field = "reasoning_text" if kind == "reasoning" else "output_text"
        delta = self._part_event(f"response.{field}.delta") | {"delta": text}
        return [*events, delta | ({"logprobs": []} if kind == "message" else {})]

    def _call(self, call: CallPiece) -> list[Body]:
        events = []
        if call.name is not None:
            events = [*self._end(), *self._begin("function_call", name=call.name)]
        self._text += call.arguments
        delta = self._event("response.function_call_arguments.delta") | {"delta": call.arguments}
        return [*events, delta] if call.arguments else events

    def _begin(self, kind: str, *, name: str = "") -> list[Body]:
        self._open, self._text = kind, ""
        prefix = {"reasoning": "rs", "message": "msg", "function_call": "fc"}[kind]
        item: Body = {"id": f"{prefix}_{uuid.uuid4().hex}", "type": kind, "status": "in_progress"}
        if kind == "message":
            item |= {"role": "assistant", "content": []}
        elif kind == "reasoning":
            item |= {"summary": [], "content": []}
        else:
            item |= {"call_id": self._new_call_id(), "name": name, "arguments": ""}
        self.items.append(item)
        added = {
            "type": "response.output_item.added",
            "output_index": len(self.items) - 1,
            "item": dict(item),
        }
        if kind == "function_call":
            return [added]
        part = self._part_event("response.content_part.added") | {"part": self._part()}
        return [added, part]

    def _end(self, status: str = "completed") -> list[Body]:
        if not self._open:
            return []
        kind, item = self._open, self.items[-1]
        if kind == "function_call":
            events = [
                self._event("response.function_call_arguments.done")
                | {"arguments": self._text, "name": item["name"]}
            ]
            item["arguments"] = self._text
        else:
            field = "reasoning_text" if kind == "reasoning" else "output_text"
            done = self._part_event(f"response.{field}.done") | {"text": self._text}
            part = self._part()
            item["content"] = [part]
            events = [
                done | ({"logprobs": []} if kind == "message" else {}),
                self._part_event("response.content_part.done") | {"part": part},
            ]
        item["status"], self._open = status, ""
        ended = {
            "type": "response.output_item.done",
            "output_index": len(self.items) - 1,
            "item": item,
        }
        return [*events, ended]

    def _part(self) -> Body:
        if self._open == "reasoning":
            return {"type": "reasoning_text", "text": self._text}
        return {"type": "output_text", "text": self._text, "annotations": [], "logprobs": []}

    def _event(self, kind: str) -> Body:
        place = {"item_id": self.items[-1]["id"], "output_index": len(self.items) - 1}
        return {"type": kind} | place

    def _part_event(self, kind: str) -> Body:
        return self._event(kind) | {"content_index": 0}
