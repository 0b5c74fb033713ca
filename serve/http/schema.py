"""Answers in `/openapi.json`: statuses and the error object."""

from __future__ import annotations

from typing import Any

from fastapi import FastAPI
from fastapi.openapi.utils import get_openapi
from pydantic import BaseModel

Documents = dict[int | str, dict[str, Any]]

DESCRIPTIONS = {
    200: "The answer.",
    400: "A parameter that is wrong or not supported; `param` names it.",
    401: "The API key is missing or wrong.",
    404: "No such model.",
    408: "Not finished within the time that this server gives a request.",
    413: "The body is larger than this server takes.",
    429: "Too many requests at the same time; `Retry-After` gives the seconds to wait.",
    500: "The engine failed on this request.",
    503: "The server is shutting down.",
}


class Error(BaseModel):
    message: str
    type: str
    param: str | None
    code: str | None


class ErrorBody(BaseModel):
    error: Error


def documented(*statuses: int) -> Documents:
    """Descriptions of statuses; all but 200 have the error object."""
    return {
        status: {"description": DESCRIPTIONS[status]}
        | ({} if status == 200 else {"model": ErrorBody})
        for status in statuses
    }


def answers() -> Documents:
    """An answer in one piece or, when `stream` is true, as server-sent events; and errors."""
    found = documented(200, 400, 401, 404, 408, 413, 429, 500, 503)
    # Events as texts or, where they have names, as their fields.
    found[200]["content"] = {
        "application/json": {"schema": {"type": "object"}},
        "text/event-stream": {"schema": {"type": ["string", "object"]}},
    }
    return found


def describe(app: FastAPI, *, model: str, guarded: bool) -> None:
    """`/openapi.json` without FastAPI's own 422, which never comes, and with the API key where one
    is asked for."""

    def openapi() -> dict[str, Any]:
        if app.openapi_schema is None:
            schema = get_openapi(title=app.title, version=app.version, routes=app.routes)
            components = schema["components"]
            for name in ("HTTPValidationError", "ValidationError"):
                components["schemas"].pop(name, None)
            # The model's name as an example, for clients that read only the schema.
            for name in ("CompletionRequest", "ChatRequest", "ResponsesRequest"):
                components["schemas"][name]["properties"]["model"]["examples"] = [model]
            if guarded:
                components["securitySchemes"] = {"key": {"type": "http", "scheme": "bearer"}}
            for path in schema["paths"].values():
                for operation in path.values():
                    operation["responses"].pop("422", None)
                    if guarded and "401" in operation["responses"]:
                        operation["security"] = [{"key": []}]
            app.openapi_schema = schema
        return app.openapi_schema

    app.openapi = openapi
