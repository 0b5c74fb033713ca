"""Schema of answers in `/openapi.json`: bodies, statuses, the error object. Nothing is checked
against it while serving."""

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


class PromptTokens(BaseModel):
    cached_tokens: int


class Usage(BaseModel):
    prompt_tokens: int
    completion_tokens: int
    total_tokens: int
    prompt_tokens_details: PromptTokens


class CompletionLogprobs(BaseModel):
    tokens: list[str]
    token_logprobs: list[float | None]
    top_logprobs: list[dict[str, float] | None]
    text_offset: list[int]


class PromptLogprob(BaseModel):
    logprob: float
    rank: int
    decoded_token: str


class CompletionChoice(BaseModel):
    index: int
    text: str
    logprobs: CompletionLogprobs | None
    finish_reason: str | None
    token_ids: list[int] | None = None
    prompt_token_ids: list[int] | None = None
    prompt_logprobs: list[dict[str, PromptLogprob] | None] | None = None


class SpeculativeDecoding(BaseModel):
    mean_acceptance_length: float
    draft_acceptance_rate: float
    acceptance_histogram: list[int]
    acceptance_histogram_by_draft_length: dict[str, list[int]]
    num_spec_steps: int
    num_accepted_draft_tokens: int
    num_draft_tokens: int
    num_spec_tokens: int
    num_target_passes: int
    num_committed_tokens: int
    tau: float | None
    per_step_accepted: list[int] | None = None
    per_step_drafted: list[int] | None = None
    per_step_committed: list[int] | None = None
    per_step_begin: list[int] | None = None


class DraftingState(SpeculativeDecoding):
    k: int
    drafting: str


class SpeculationBody(BaseModel):
    id: str
    object: str
    choices: list[DraftingState]


class RequestMetrics(BaseModel):
    speculative_decoding: SpeculativeDecoding | None
    choices: list[SpeculativeDecoding] | None = None


class AnswerSchema(BaseModel):
    id: str
    object: str
    created: int
    model: str
    usage: Usage | None = None
    metrics: RequestMetrics | None = None


class CompletionBody(AnswerSchema):
    choices: list[CompletionChoice]


class TopLogprob(BaseModel):
    token: str
    logprob: float
    bytes: list[int] | None


class ChatLogprob(TopLogprob):
    top_logprobs: list[TopLogprob]


class ChatLogprobs(BaseModel):
    content: list[ChatLogprob]


class MadeFunction(BaseModel):
    name: str
    arguments: str


class MadeCallSchema(BaseModel):
    id: str
    type: str
    function: MadeFunction


class ChatMessage(BaseModel):
    role: str
    content: str | None
    reasoning_content: str | None = None
    tool_calls: list[MadeCallSchema] | None = None


class ChatChoice(BaseModel):
    index: int
    message: ChatMessage
    logprobs: ChatLogprobs | None
    finish_reason: str | None
    token_ids: list[int] | None = None


class ChatBody(AnswerSchema):
    choices: list[ChatChoice]
    prompt_token_ids: list[int] | None = None
    prompt_logprobs: list[dict[str, PromptLogprob] | None] | None = None


class Model(BaseModel):
    id: str
    object: str
    created: int
    owned_by: str
    root: str
    parent: str | None
    max_model_len: int
    max_draft_depth: int
    max_draft_tokens: int


class ModelList(BaseModel):
    object: str
    data: list[Model]


class VersionBody(BaseModel):
    version: str


class LoadBody(BaseModel):
    server_load: int


class TokenizeBody(BaseModel):
    count: int
    max_model_len: int
    tokens: list[int]
    token_strs: list[str] | None


class DetokenizeBody(BaseModel):
    prompt: str


class TokenizerInfo(BaseModel):
    tokenizer_class: str
    vocab_size: int
    model_max_length: int
    bos_token: str | None
    eos_token: str | None
    unk_token: str | None
    pad_token: str | None
    chat_template: str | None


def documented(*statuses: int, model: type[BaseModel] = ErrorBody) -> Documents:
    return {status: {"model": model, "description": DESCRIPTIONS[status]} for status in statuses}


def answers_of(model: type[BaseModel]) -> Documents:
    """An answer in one piece or, when `stream` is true, as server-sent events; and errors."""
    # Events as texts or, where they have names, as their fields.
    stream = {"text/event-stream": {"schema": {"type": ["string", "object"]}}}
    answer = {"model": model, "description": DESCRIPTIONS[200], "content": stream}
    return {200: answer, **documented(400, 401, 404, 408, 413, 429, 500, 503)}


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
