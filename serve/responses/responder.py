"""Response objects of the Responses API, whole or as a stream of events."""

from __future__ import annotations

import bisect
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar

from draftsmith.serve.http.chat import new_call_id
from draftsmith.serve.http.responses import Body, Responder
from draftsmith.serve.http.streams import sent_event
from draftsmith.serve.requests.request import FinishReason, Request, Update
from draftsmith.serve.responses.items import OutputItems
from draftsmith.serve.responses.protocol import ResponsesRequest
from draftsmith.serve.tools.answer import AnswerForm, AnswerParser, joined
from draftsmith.serve.tools.reasoning import Thinking


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
