"""`/v1/responses`: response objects, whole or as a stream of events that builds their items.
Nothing is stored."""

from __future__ import annotations

import bisect
import time
import uuid
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from fastapi import FastAPI, Response
from fastapi import Request as HttpRequest

from draftsmith.serve.http.chat import new_call_id
from draftsmith.serve.http.completions import answer, planned
from draftsmith.serve.http.responses import Body, Responder
from draftsmith.serve.http.responses_body import ResponsesRequest, chat_request
from draftsmith.serve.http.schema import answers
from draftsmith.serve.http.server import Server
from draftsmith.serve.http.streams import sent_event
from draftsmith.serve.requests.request import FinishReason, Request, Update
from draftsmith.serve.tools.answer import AnswerForm, Thinking
from draftsmith.serve.tools.call_format import AnswerPiece


def add_responses_endpoint(app: FastAPI, server: Server) -> None:
    @app.post("/v1/responses", responses=answers())
    async def responses(body: ResponsesRequest, request: HttpRequest) -> Response:
        model = server.check_model(body.model)
        chat = chat_request(body)
        plan = await planned(server, request, chat)
        responder = ResponsesResponder(
            model, server.vocabulary, chat, [plan.prompt], server.report, given=body, form=plan.form
        )
        return await answer(server, request, responder, plan)


@dataclass
class ResponsesResponder(Responder):
    """`given` is the request's body, `form` the way its answer is read."""

    prefix = "resp_"
    last_frame = ""
    given: ResponsesRequest = field(kw_only=True)
    form: AnswerForm = field(kw_only=True)
    num_events: int = 0

    def __post_init__(self) -> None:
        super().__post_init__()
        self.parser, self.items = self.form.parser(), OutputItems()

    def body(self, requests: Sequence[Request]) -> Body:
        (request,) = requests
        self._push(request.text, last=True)
        self.items.finish(whole=_is_whole(request))
        return self._response(request)

    def openings(self, num_requests: int) -> list[Body]:
        kinds = ("response.created", "response.in_progress")
        return self._numbered([{"type": kind, "response": self._response(None)} for kind in kinds])

    def events(self, index: int, request: Request, update: Update) -> list[Body]:
        if update.finish_reason is None:
            return self._numbered(self._push(update.text))
        events = self._push(update.text, last=True)
        return self._numbered([*events, *self.items.finish(whole=_is_whole(request))])

    def closings(self, requests: Sequence[Request]) -> list[Body]:
        response = self._response(requests[0])
        return self._numbered([{"type": f"response.{response['status']}", "response": response}])

    def failed(self, error: Body) -> Body:
        parts = error["error"]
        event = {key: parts[key] for key in ("code", "message", "param")}
        return self._numbered([{"type": "error"} | event])[0]

    def frame(self, body: Body) -> str:
        return sent_event(body, body["type"])

    def _numbered(self, events: list[Body]) -> list[Body]:
        begin, self.num_events = self.num_events, self.num_events + len(events)
        return [event | {"sequence_number": number} for number, event in enumerate(events, begin)]

    def _push(self, text: str, *, last: bool = False) -> list[Body]:
        """Events of text of the answer, which may be its last."""
        pieces = self.parser.pieces(text, last=last)
        return [event for piece in pieces for event in self.items.push(piece)]

    def _response(self, request: Request | None) -> Body:
        """The response object; None while it is being made."""
        given, status = self.given, "in_progress"
        if request is not None:
            status = "completed" if _is_whole(request) else "incomplete"
        cut = {"reason": "max_output_tokens"} if status == "incomplete" else None
        known = given.model_dump(exclude_none=True, by_alias=True)
        return {
            "id": self.id,
            "object": "response",
            "created_at": self.created,
            "completed_at": int(time.time()) if status == "completed" else None,
            "status": status,
            "error": None,
            "incomplete_details": cut,
            "instructions": given.instructions,
            "max_output_tokens": given.max_output_tokens,
            "metadata": given.metadata or {},
            "model": self.model,
            "output": self.items.items if request is not None else [],
            "parallel_tool_calls": given.parallel_tool_calls is not False,
            "previous_response_id": None,
            "reasoning": {"effort": None, "summary": None} | known.get("reasoning", {}),
            "store": False,
            "temperature": 1.0 if given.temperature is None else given.temperature,
            "text": {"format": {"type": "text"}} | known.get("text", {}),
            "tool_choice": known.get("tool_choice", "auto"),
            "tools": known.get("tools", []),
            "top_p": 1.0 if given.top_p is None else given.top_p,
            "truncation": "disabled",
            "usage": None if request is None else self._response_usage(request),
        } | ({} if request is None else self.metrics([request]))

    def _response_usage(self, request: Request) -> Body:
        return {
            "input_tokens": request.num_prompt,
            "input_tokens_details": {"cached_tokens": request.num_cached},
            "output_tokens": request.num_output,
            "output_tokens_details": {"reasoning_tokens": self._num_reasoning(request)},
            "total_tokens": request.num_prompt + request.num_output,
        }

    def _num_reasoning(self, request: Request) -> int:
        """Tokens up to the end marker of the reasoning."""
        format, output = self.form.reasoning, request.output
        reasons = any(item["type"] == "reasoning" for item in self.items.items)
        if format is None or self.form.thinking is Thinking.DONE or not reasons:
            return 0
        end = format.end
        return min(
            bisect.bisect_left(
                range(1, len(output) + 1),
                True,
                key=lambda count: end in self.vocabulary.decode(output[:count]),
            )
            + 1,
            len(output),
        )


def _is_whole(request: Request) -> bool:
    return request.finish_reason is not FinishReason.LENGTH


class ItemKind(NamedTuple):
    prefix: str  # of ids
    text: str  # its text, as events name it
    fields: Body  # of an item that has begun


ITEM_KINDS = {
    "reasoning": ItemKind("rs", "reasoning_text", {"summary": [], "content": []}),
    "message": ItemKind("msg", "output_text", {"role": "assistant", "content": []}),
    "function_call": ItemKind("fc", "function_call_arguments", {"arguments": ""}),
}
OF_MESSAGES: Body = {"logprobs": []}


class OutputItems:
    """Items in the order of their first piece, each done before the next begins."""

    def __init__(self) -> None:
        self.items: list[Body] = []
        self._open = ""  # type of the last item, while it may still grow
        self._text = ""  # of the open item

    def push(self, piece: AnswerPiece) -> list[Body]:
        """Events of a piece."""
        events = []
        for kind, text in (("reasoning", piece.reasoning), ("message", piece.content)):
            if text:
                begun = [] if self._open == kind else [*self._end(), *self._begin(kind)]
                events += [*begun, *self._write(text)]
        for call in piece.calls:
            if call.name is not None:
                events += [*self._end(), *self._begin("function_call", name=call.name)]
            events += self._write(call.arguments)
        return events

    def finish(self, *, whole: bool) -> list[Body]:
        """Events of the end; `whole` is false for an answer that was cut off. An answer without
        anything is an empty message."""
        events = [] if self.items else self._begin("message")
        return [*events, *self._end("completed" if whole else "incomplete")]

    def _write(self, text: str) -> list[Body]:
        self._text += text
        return [self._text_event("delta") | {"delta": text}] if text else []

    def _begin(self, kind: str, *, name: str = "") -> list[Body]:
        self._open, self._text = kind, ""
        item: Body = {
            "id": f"{ITEM_KINDS[kind].prefix}_{uuid.uuid4().hex}",
            "type": kind,
            "status": "in_progress",
            **ITEM_KINDS[kind].fields,
        }
        item |= {"call_id": new_call_id(), "name": name} if name else {}
        self.items.append(item)
        return [self._item_event("added", dict(item)), *self._part_event("added")]

    def _end(self, status: str = "completed") -> list[Body]:
        if not self._open:
            return []
        item, written = self.items[-1], {"text": self._text}
        if self._open == "function_call":
            item["arguments"] = self._text
            written = {"arguments": self._text, "name": item["name"]}
        else:
            item["content"] = [self._part()]
        events = [self._text_event("done") | written, *self._part_event("done")]
        item["status"], self._open = status, ""
        return [*events, self._item_event("done", item)]

    def _part(self) -> Body:
        part = {"type": ITEM_KINDS[self._open].text, "text": self._text}
        return part | ({"annotations": [], **OF_MESSAGES} if self._open == "message" else {})

    def _item_event(self, end: str, item: Body) -> Body:
        index = len(self.items) - 1
        return {"type": f"response.output_item.{end}", "output_index": index, "item": item}

    def _part_event(self, end: str) -> list[Body]:
        """Calls have no parts."""
        if self._open == "function_call":
            return []
        return [self._event(f"content_part.{end}") | {"part": self._part()}]

    def _text_event(self, end: str) -> Body:
        event = self._event(f"{ITEM_KINDS[self._open].text}.{end}")
        return event | (OF_MESSAGES if self._open == "message" else {})

    def _event(self, kind: str) -> Body:
        place = {"item_id": self.items[-1]["id"], "output_index": len(self.items) - 1}
        part = {} if self._open == "function_call" else {"content_index": 0}
        return {"type": f"response.{kind}"} | place | part
