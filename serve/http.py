"""The HTTP face: OpenAI's endpoints over the engine's loop. Every error is an OpenAI error object of one sentence."""

from __future__ import annotations

import asyncio
import json
import secrets
import time
from collections.abc import AsyncIterator
from dataclasses import dataclass
from typing import Any

from fastapi import Depends, FastAPI, Request, Response
from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse, StreamingResponse
from starlette.exceptions import HTTPException

from draftsmith.errors import UserError
from draftsmith.serve.exchange import Exchange
from draftsmith.serve.loop import EngineLoop
from draftsmith.serve.metrics import ServerMetrics
from draftsmith.serve.protocol import ChatRequest, CompletionRequest, Generation
from draftsmith.serve.request import FinishReason
from draftsmith.serve.responses import Extras, Responder, chat_responder, completion_responder, error_body
from draftsmith.serve.scheduler import QueueFull
from draftsmith.serve.tokens import chat_prompt, completion_prompts
from draftsmith.version import __version__

LEARN_HEADER = "x-draftsmith-learn"  # "off" keeps a request's rounds out of the buffer
OPEN_PATHS = ("/health", "/metrics", "/version")


class Refusal(Exception):
    """An answer other than 200, as an OpenAI error object."""

    def __init__(self, status: int, message: str, *, kind: str = "invalid_request_error", code: str | None = None):
        super().__init__(message)
        self.status, self.kind, self.code = status, kind, code


@dataclass
class Server:
    """What the endpoints share."""

    loop: EngineLoop
    model: str
    metrics: ServerMetrics
    api_key: str | None = None

    @property
    def tokenizer(self) -> Any:
        return self.loop.engine.target.tokenizer()

    def check_model(self, model: str) -> None:
        if model != self.model:
            raise Refusal(404, f"model {model!r} is not served here; use {self.model!r}", code="model_not_found")


def create_app(server: Server) -> FastAPI:
    async def authorise(request: Request) -> None:
        given, key = request.headers.get("authorization", ""), server.api_key
        if key is None or request.url.path in OPEN_PATHS:
            return
        if not secrets.compare_digest(given.encode(), f"Bearer {key}".encode()):
            raise Refusal(401, "the API key is missing or wrong; send it as a bearer token", code="invalid_api_key")

    # A dependency and no middleware: starlette's middleware would hide from us that a client has gone.
    app = FastAPI(title="draftsmith", version=__version__, docs_url=None, redoc_url=None, dependencies=[Depends(authorise)])
    _add_errors(app)

    @app.get("/health")
    async def health() -> Response:
        return Response(status_code=200 if server.loop.healthy else 503)

    @app.get("/version")
    async def version() -> dict[str, str]:
        return {"version": __version__}

    @app.get("/metrics")
    async def metrics() -> Response:
        return Response(server.metrics.text(), media_type="text/plain; version=0.0.4; charset=utf-8")

    @app.get("/v1/models")
    async def models() -> dict[str, Any]:
        entry = {"id": server.model, "object": "model", "created": 0, "owned_by": "draftsmith"}
        return {"object": "list", "data": [entry | {"max_model_len": server.loop.engine.max_length}]}

    @app.post("/v1/completions")
    async def completions(body: CompletionRequest, request: Request) -> Response:
        server.check_model(body.model)
        prompts = completion_prompts(body.prompt, server.tokenizer)
        responder = completion_responder(server.model, server.tokenizer, _extras(body))
        return await _answer(server, request, body, prompts, responder)

    @app.post("/v1/chat/completions")
    async def chat(body: ChatRequest, request: Request) -> Response:
        server.check_model(body.model)
        prompt = chat_prompt([message.plain() for message in body.messages], server.tokenizer)
        responder = chat_responder(server.model, server.tokenizer, _extras(body))
        return await _answer(server, request, body, [prompt], responder)

    return app


def _extras(body: Generation) -> Extras:
    return Extras(body.speculation.report, bool(body.return_token_ids), bool(body.return_tokens_as_token_ids))


async def _answer(server: Server, request: Request, body: Generation, prompts: list[list[int]], responder: Responder) -> Response:
    choices = body.n or 1
    params = [body.sampling(index) for index in range(choices)]
    exchange = Exchange(server.loop)
    exchange.submit(
        [prompt for prompt in prompts for _ in range(choices)],
        params * len(prompts),
        request_class=body.request_class,
        learn=request.headers.get(LEARN_HEADER, "on").lower() not in ("off", "false", "0", "no"),
    )
    if body.stream:
        events = _stream(server, exchange, body, len(prompts), responder)
        return StreamingResponse(events, media_type="text/event-stream", headers={"cache-control": "no-cache"})
    if not await _finished(request, exchange):
        return Response(status_code=499)
    for finished in exchange.requests:
        server.metrics.finished(finished)
        _check_ended(finished.finish_reason)
    return JSONResponse(responder.body(exchange.requests, len(prompts)))


async def _finished(request: Request, exchange: Exchange) -> bool:
    """Waits for the answer; False when the client went away first, which cancels it."""
    answer = asyncio.ensure_future(exchange.finished())
    gone = asyncio.ensure_future(_disconnected(request))
    try:
        await asyncio.wait({answer, gone}, return_when=asyncio.FIRST_COMPLETED)
        return answer.done()
    finally:
        for task in (answer, gone):
            task.cancel()
        exchange.cancel()


async def _disconnected(request: Request) -> None:
    while (await request.receive())["type"] != "http.disconnect":
        pass


def _check_ended(reason: FinishReason | None) -> None:
    if reason is FinishReason.ERROR:
        raise Refusal(500, "the engine could not finish this request; see the server's log", kind="server_error")
    if reason is FinishReason.ABORT:
        raise Refusal(503, "the server is shutting down; send the request to another one", kind="server_error")


async def _stream(
    server: Server, exchange: Exchange, body: Generation, num_prompts: int, responder: Responder
) -> AsyncIterator[str]:
    try:
        for index in range(len(exchange.requests)):
            if (opening := responder.opening(index)) is not None:
                yield _event(responder.chunk([opening]))
        previous_s: dict[int, float] = {}
        async for index, request, update in exchange.events():
            now_s = time.monotonic()
            if index in previous_s:
                server.metrics.updated(now_s - previous_s[index])
            previous_s[index] = now_s
            # Also without text (half a character, say): a client measures the arrival of tokens by it.
            yield _event(responder.update(index, request, update))
            if update.finish_reason is not None:
                server.metrics.finished(request)
        with_usage = body.stream_options is not None and bool(body.stream_options.include_usage)
        if (closing := responder.closing(exchange.requests, num_prompts, with_usage=with_usage)) is not None:
            yield _event(closing)
        yield "data: [DONE]\n\n"
    finally:
        exchange.cancel()


def _event(body: dict[str, Any]) -> str:
    return f"data: {json.dumps(body, ensure_ascii=False, separators=(',', ':'))}\n\n"


def _add_errors(app: FastAPI) -> None:
    @app.exception_handler(RequestValidationError)
    async def invalid(request: Request, error: RequestValidationError) -> JSONResponse:
        first = error.errors()[0]
        if first["type"] == "json_invalid":
            return JSONResponse(error_body("the request body is not valid JSON; mend it"), status_code=400)
        # Where the schema allows several types, the first entry may be about the wrong one; the name is right in any case.
        name = next((str(part) for part in first["loc"] if part != "body"), None)
        return JSONResponse(error_body(_sentence(first, name), param=name), status_code=400)

    @app.exception_handler(QueueFull)
    async def full(request: Request, error: QueueFull) -> JSONResponse:
        return JSONResponse(error_body(str(error), kind="server_error", code="overloaded"), status_code=503)

    @app.exception_handler(UserError)
    async def refused(request: Request, error: UserError) -> JSONResponse:
        return JSONResponse(error_body(str(error)), status_code=400)

    @app.exception_handler(Refusal)
    async def refusal(request: Request, error: Refusal) -> JSONResponse:
        return JSONResponse(error_body(str(error), kind=error.kind, code=error.code), status_code=error.status)

    @app.exception_handler(Exception)
    async def unforeseen(request: Request, error: Exception) -> JSONResponse:
        body = error_body("the server failed on this request; see its log", kind="server_error")
        return JSONResponse(body, status_code=500)

    @app.exception_handler(HTTPException)
    async def other(request: Request, error: HTTPException) -> JSONResponse:
        message = f"{request.method} {request.url.path}: {error.detail}"
        return JSONResponse(error_body(message), status_code=error.status_code)


def _sentence(error: dict[str, Any], name: str | None) -> str:
    if name is None:
        if error["type"] in ("dict_type", "model_attributes_type"):
            return "the request body is no JSON object; send one as application/json"
        return f"the request body is wrong: {error['msg'].removeprefix('Value error, ')}"
    if error["type"] == "extra_forbidden":
        path = ".".join(str(part) for part in error["loc"] if part != "body")
        return f"parameter {path!r} is not supported; leave it out"
    if error["type"] == "missing":
        return f"parameter {name!r} is required; give it"
    return f"parameter {name!r}: {error['msg'].removeprefix('Value error, ')}"
