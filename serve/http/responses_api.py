"""`/v1/responses`: response objects, whole or as a stream of events that builds their items.
Nothing is stored."""

from __future__ import annotations

import bisect
import time
import uuid
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar, Literal

from fastapi import FastAPI, Response
from fastapi import Request as HttpRequest
from pydantic import BaseModel

from draftsmith.errors import UserError
from draftsmith.serve.http.chat import chat_plan, new_call_id
from draftsmith.serve.http.completions import answer, response_options
from draftsmith.serve.http.errors import as_refusal
from draftsmith.serve.http.responses import Body, Responder
from draftsmith.serve.http.responses_body import NAMES, ResponsesRequest, chat_request
from draftsmith.serve.http.schema import ANSWER_STATUSES, RequestMetrics, documented, events_of
from draftsmith.serve.http.server import Server
from draftsmith.serve.http.streams import sent_event
from draftsmith.serve.requests.request import FinishReason, Request, Update
from draftsmith.serve.tools.answer import AnswerForm, AnswerParser, Thinking, joined
from draftsmith.serve.tools.call_format import AnswerPiece, CallPiece


def add_responses_endpoint(app: FastAPI, server: Server) -> None:
    @app.post(
        "/v1/responses", responses={**events_of(ResponseBody), **documented(*ANSWER_STATUSES)}
    )
    async def responses(body: ResponsesRequest, request: HttpRequest) -> Response:
        model = server.check_model(body.model)
        chat = chat_request(body)

        def api_name(name: str) -> str:
            name = chat.api_name(name)
            return NAMES.get(name, name)

        try:
            plan = await server.take_in(request, lambda: chat_plan(server, chat))
        except UserError as error:
            raise as_refusal(error, api_name=api_name) from error
        responder = ResponsesResponder(
            model,
            server.vocabulary,
            response_options(server, chat),
            [plan.prompt],
            prefix="resp",
            asked=body,
            form=plan.form,
        )
        return await answer(server, request, chat, responder, plan, api_name=api_name)


class InputDetails(BaseModel):
    cached_tokens: int


class OutputDetails(BaseModel):
    reasoning_tokens: int


class ResponseUsage(BaseModel):
    input_tokens: int
    input_tokens_details: InputDetails
    output_tokens: int
    output_tokens_details: OutputDetails
    total_tokens: int


class ContentPart(BaseModel):
    type: Literal["output_text", "reasoning_text"]
    text: str
    annotations: list[Any] | None = None
    logprobs: list[Any] | None = None


class OutputItem(BaseModel):
    """A message, reasoning or a call."""

    id: str
    type: Literal["message", "reasoning", "function_call"]
    status: str
    role: str | None = None
    content: list[ContentPart] | None = None
    summary: list[Any] | None = None
    call_id: str | None = None
    name: str | None = None
    arguments: str | None = None


class ResponseBody(BaseModel):
    id: str
    object: str
    created_at: int
    completed_at: int | None
    status: str
    error: None
    incomplete_details: dict[str, str] | None
    instructions: str | None
    max_output_tokens: int | None
    metadata: dict[str, Any]
    model: str
    output: list[OutputItem]
    parallel_tool_calls: bool
    previous_response_id: None
    reasoning: dict[str, Any]
    store: bool
    temperature: float
    text: dict[str, Any]
    tool_choice: str | dict[str, Any]
    tools: list[dict[str, Any]]
    top_p: float
    truncation: str
    usage: ResponseUsage
    lossless: bool | None = None
    metrics: RequestMetrics | None = None


@dataclass
class ResponsesResponder(Responder):
    """`asked` is the request's body, `form` the way its answer is read."""

    asked: ResponsesRequest = field(default_factory=lambda: ResponsesRequest(input=""))
    form: AnswerForm = field(default_factory=AnswerForm)
    parser: AnswerParser = field(init=False)
    items: OutputItems = field(default_factory=lambda: OutputItems(new_call_id))
    num_events: int = 0

    def __post_init__(self) -> None:
        super().__post_init__()
        self.id = self.id.replace("-", "_")
        self.parser = self.form.parser()

    def body(self, requests: Sequence[Request]) -> Body:
        (request,) = requests
        self.items.push(self._shown(joined([self.parser.push(request.text), self.parser.finish()])))
        self.items.finish(whole=_is_whole(request))
        return self._response(request)

    def choice(self, index: int, request: Request) -> Body:
        raise NotImplementedError("a response has items and no choices")

    def delta(self, index: int, request: Request, update: Update) -> Body:
        raise NotImplementedError("a response has items and no choices")

    def openings(self, num_requests: int) -> list[Body]:
        kinds = ("response.created", "response.in_progress")
        return self._numbered([{"type": kind, "response": self._response(None)} for kind in kinds])

    def events(self, index: int, request: Request, update: Update) -> list[Body]:
        piece = self.parser.push(update.text)
        if update.finish_reason is None:
            return self._numbered(self.items.push(self._shown(piece)))
        events = self.items.push(self._shown(joined([piece, self.parser.finish()])))
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

    last_frame: ClassVar[str] = ""

    def _numbered(self, events: list[Body]) -> list[Body]:
        begin, self.num_events = self.num_events, self.num_events + len(events)
        return [event | {"sequence_number": number} for number, event in enumerate(events, begin)]

    def _shown(self, piece: Any) -> Any:
        return piece if self.options.reasoning else piece._replace(reasoning="")

    def _response(self, request: Request | None) -> Body:
        """The response object; None while it is being made."""
        asked, status = self.asked, "in_progress"
        if request is not None:
            status = "completed" if _is_whole(request) else "incomplete"
        cut = {"reason": "max_output_tokens"} if status == "incomplete" else None
        known = asked.model_dump(exclude_none=True, by_alias=True)
        return (
            {
                "id": self.id,
                "object": "response",
                "created_at": self.created,
                "completed_at": int(time.time()) if status == "completed" else None,
                "status": status,
                "error": None,
                "incomplete_details": cut,
                "instructions": asked.instructions,
                "max_output_tokens": asked.max_output_tokens,
                "metadata": asked.metadata or {},
                "model": self.model,
                "output": self.items.items if request is not None else [],
                "parallel_tool_calls": asked.parallel_tool_calls is not False,
                "previous_response_id": None,
                "reasoning": {"effort": None, "summary": None} | known.get("reasoning", {}),
                "store": False,
                "temperature": 1.0 if asked.temperature is None else asked.temperature,
                "text": {"format": {"type": "text"}} | known.get("text", {}),
                "tool_choice": known.get("tool_choice", "auto"),
                "tools": known.get("tools", []),
                "top_p": 1.0 if asked.top_p is None else asked.top_p,
                "truncation": "disabled",
                "usage": None if request is None else self._response_usage(request),
            }
            | ({} if self.options.lossless else {"lossless": False})
            | ({} if request is None else self.metrics([request]))
        )

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
