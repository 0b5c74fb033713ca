"""Errors of the API: every answer that is not 200 is an OpenAI error object of one sentence."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from typing import Any

from fastapi import FastAPI, Request
from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse
from starlette.exceptions import HTTPException
from starlette.routing import Match, Route

from draftsmith.errors import UserError
from draftsmith.serve.engine.loop import EngineDead, ShuttingDown
from draftsmith.serve.engine.scheduler import QueueFull
from draftsmith.serve.requests.request import FinishReason
from draftsmith.serve.requests.request import Request as EngineRequest

RETRY_AFTER = {"retry-after": "1"}
_LEADING_NAME = re.compile(r"[a-z_]+")
SHORT_NAMES = (
    "temperature", "stop", "seed", "logprobs", "prompt", "messages", "grammar", "speculation",
    "tools", "verbosity", "n",
)  # fmt: skip


# OpenAI's types of errors by status; of other ones below 500 it is the request's fault.
TYPES = {401: "authentication_error", 408: "timeout_error", 429: "rate_limit_error"}


class Refusal(Exception):
    """An answer other than 200, as an OpenAI error object."""

    def __init__(
        self,
        status: int,
        message: str,
        *,
        param: str | None = None,
        code: str | None = None,
        headers: dict[str, str] | None = None,
    ):
        super().__init__(message)
        self.status, self.param, self.code, self.headers = status, param, code, headers

    def body(self) -> dict[str, Any]:
        kind = "server_error" if self.status >= 500 else "invalid_request_error"
        kind = TYPES.get(self.status, kind)
        return {
            "error": {"message": str(self), "type": kind, "param": self.param, "code": self.code}
        }

    def response(self) -> ErrorResponse:
        return ErrorResponse(self.body(), status_code=self.status, headers=self.headers)


class ErrorResponse(JSONResponse):
    def render(self, content: Any) -> bytes:
        # Messages and names quote the client's text, which may hold half a surrogate pair: only
        # ASCII escapes can carry that.
        return json.dumps(
            content, ensure_ascii=True, allow_nan=False, separators=(",", ":")
        ).encode()


def overloaded(message: str) -> Refusal:
    return Refusal(429, message, code="overloaded", headers=RETRY_AFTER)


def timed_out(seconds: float) -> Refusal:
    return Refusal(408, f"no answer within {seconds:g} s; ask for fewer tokens", code="timeout")


def failure(request: EngineRequest) -> Refusal | None:
    """Error response of a generation that ended without an answer; None for one with an answer."""
    reason = request.finish_reason
    if reason is FinishReason.ERROR and request.error:
        return Refusal(400, request.error)
    if reason is FinishReason.ERROR:
        return Refusal(500, "the engine could not finish this request; see the server's log")
    if reason is FinishReason.ABORT:
        return shutting_down("the server is shutting down; send the request to another one")
    return None


def shutting_down(message: str) -> Refusal:
    return Refusal(503, message, code="shutting_down", headers=RETRY_AFTER)


def unforeseen_failure() -> Refusal:
    return Refusal(500, "the server failed on this request; see its log")


def as_refusal(error: UserError, *, api_name: Callable[[str], str] = str) -> Refusal:
    """Error response of an error of the engine. `api_name` maps the engine's name of a parameter to
    the request's."""
    if isinstance(error, ShuttingDown):
        return shutting_down(str(error))
    if isinstance(error, EngineDead):
        return Refusal(503, str(error), code="engine_dead")
    if isinstance(error, QueueFull):
        return overloaded(str(error))
    name = named_param(str(error))
    return Refusal(400, str(error), param=None if name is None else api_name(name))


def named_param(message: str) -> str | None:
    """Parameter that a sentence is about, None for none. Such a sentence begins with its name,
    which has an underscore or is one of `SHORT_NAMES`."""
    leading = _LEADING_NAME.match(message)
    name = leading.group() if leading else ""
    return name if "_" in name or name in SHORT_NAMES else None


def add_error_handlers(app: FastAPI) -> None:
    @app.exception_handler(RequestValidationError)
    async def invalid(request: Request, error: RequestValidationError) -> ErrorResponse:
        return validation_refusal(error).response()

    @app.exception_handler(UserError)
    async def refused(request: Request, error: UserError) -> ErrorResponse:
        return as_refusal(error).response()

    @app.exception_handler(RecursionError)
    async def nested(request: Request, error: RecursionError) -> ErrorResponse:
        return Refusal(400, "the request is nested too deeply; send a flatter one").response()

    @app.exception_handler(Refusal)
    async def refusal(request: Request, error: Refusal) -> ErrorResponse:
        return error.response()

    @app.exception_handler(HTTPException)
    async def other(request: Request, error: HTTPException) -> ErrorResponse:
        message = f"{request.method} {request.url.path}: {error.detail}"
        headers = dict(error.headers or {})
        if error.status_code == 405:
            headers["Allow"] = allowed_methods(app, request)
        return Refusal(error.status_code, message, headers=headers).response()

    @app.exception_handler(Exception)
    async def unforeseen(request: Request, error: Exception) -> ErrorResponse:
        return unforeseen_failure().response()


def allowed_methods(app: FastAPI, request: Request) -> str:
    """Methods of all routes of a path; starlette gives those of the first alone."""
    methods: set[str] = set()
    for route in app.routes:
        match, _ = route.matches(request.scope)
        if match is not Match.NONE and isinstance(route, Route):
            methods |= route.methods or set()
    return ", ".join(sorted(methods))


def validation_refusal(error: RequestValidationError) -> Refusal:
    first = error.errors()[0]
    if first["type"] == "json_invalid":
        return Refusal(400, "the request body is not valid JSON; mend it")
    # Where the schema allows several types, the first entry may be about the wrong one; its name is
    # right in any case.
    name = next((str(part) for part in first["loc"] if part not in LOCATIONS), None)
    message = _sentence(first, name)
    unknown = first["type"] == "extra_forbidden"
    return Refusal(
        400,
        message,
        param=name or named_param(message),
        code="unknown_parameter" if unknown else None,
    )


def _sentence(error: dict[str, Any], name: str | None) -> str:
    reason = error["msg"].removeprefix("Value error, ")
    if name is None:
        if error["type"] in ("dict_type", "model_attributes_type", "missing"):
            return "the request body is no JSON object; send one as application/json"
        return reason
    path = ".".join(str(part) for part in error["loc"] if part not in LOCATIONS)
    if error["type"] == "extra_forbidden":
        return f"parameter {path!r} is not supported; leave it out{MENDS.get(path, '')}"
    if error["type"] == "missing":
        return f"parameter {path!r} is required; give it"
    return f"parameter {name!r}: {reason}"


# parts of an error's location that are no part of the parameter's name
LOCATIONS = ("body", "path", "query", "text body", "chat body")
MENDS = {"structural_tag": " and use tools", "best_of": " and use n"}
