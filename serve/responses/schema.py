"""Schema of response objects in `/openapi.json`."""

from __future__ import annotations

from typing import Any, Literal

from pydantic import BaseModel

from draftsmith.serve.http.schema import RequestMetrics


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
