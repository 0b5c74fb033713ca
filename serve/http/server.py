"""State that all endpoints share: the engine's loop, the tokenizer, the model's name."""

from __future__ import annotations

import copy
import time
from collections.abc import Callable
from functools import cached_property
from typing import Any, TypeVar, cast

from fastapi import Request as HttpRequest

from draftsmith.client import accepted_keys
from draftsmith.serve.config import HttpOptions
from draftsmith.serve.engine.loop import EngineLoop
from draftsmith.serve.http.errors import Refusal
from draftsmith.serve.http.limits import ServerLoad, arrival_of, tenant_of
from draftsmith.serve.http.streams import Intake, Level, StreamEvent, ThreadBridge
from draftsmith.serve.http.tokens import most_characters
from draftsmith.serve.metrics.server import ServerMetrics
from draftsmith.serve.tools.template import ChatTemplate

T = TypeVar("T")


class Server:
    """State that the endpoints share."""

    def __init__(self, loop: EngineLoop, http: HttpOptions):
        self.loop, self.http, self.load, self.created = loop, http, ServerLoad(), int(time.time())
        engine, target = loop.engine, loop.engine.target
        self.model = http.name or target.name
        self.metrics = ServerMetrics(engine, self.model)
        self.api_keys = accepted_keys(http.api_key)
        # Of every response's drafts; a request may ask for more.
        self.report = cast(Level, http.per_request_spec_decode_metrics)
        # A copy, for reading tokens on the event loop's thread while another text is encoded.
        self.vocabulary = copy.deepcopy(target.tokenizer())
        # Of a prompt that may fit into the context.
        self.most_characters = most_characters(self.vocabulary, engine.max_length)
        self.intake = Intake(target.tokenizer(), self.vocabulary, target.device)
        self.template = ChatTemplate(
            self.vocabulary,
            tool_parser=http.tool_call_parser,
            reasoning_parser=http.reasoning_parser,
        )

    @cached_property
    def bridge(self) -> ThreadBridge[StreamEvent]:
        # Made by the first request, on the event loop that serves.
        return ThreadBridge()

    async def take_in(self, request: HttpRequest, work: Callable[[], T]) -> T:
        """Result of `work` on what a request brings, on a thread for requests of its size."""
        arrival = arrival_of(request)
        return await arrival.within(self.intake.run(work, arrival.num_bytes))

    @property
    def tokenizer(self) -> Any:
        """For use on the threads of `intake` alone."""
        return self.intake.tokenizer

    def tenant(self, request: HttpRequest) -> str:
        """Client of a request as the queue distinguishes them; "" where one key or none is
        asked for."""
        key = request.headers.get("authorization", "")
        return tenant_of(key) if len(self.api_keys) > 1 else ""

    @property
    def models(self) -> list[str]:
        """Names that a request may give as its model: the target's, then its adapters'."""
        return [self.model, *self.loop.engine.adapters]

    def check_model(self, model: str | None) -> str:
        """The model's name; that of the target where the request gives none."""
        if model is not None and model not in self.models:
            names = " or ".join(map(repr, self.models))
            message = f"model {model!r} is not served here; use {names}"
            raise Refusal(404, message, param="model", code="model_not_found")
        return self.model if model is None else model

    def adapter_of(self, model: str | None) -> str:
        """Adapter of a checked model; "" for the target itself."""
        return "" if model is None or model == self.model else model
