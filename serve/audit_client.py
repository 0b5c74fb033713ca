"""The few requests an audit makes of an OpenAI-compatible server: token ids in, token ids and logprobs out."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple, TypeVar

import httpx

from draftsmith.errors import UserError

ID_PREFIX = "token_id:"
MAX_LOGPROBS = 20
Given = TypeVar("Given")
Answer = TypeVar("Answer")


class Completion(NamedTuple):
    tokens: list[int]
    top: list[dict[int, float]]  # of each token: logprobs of the likeliest tokens, by id; empty when none were asked for


@dataclass
class AuditClient:
    http: httpx.Client
    model: str
    concurrency: int = 8
    says_lossy: bool = False  # the server calls its own answers so
    can_be_plain: bool = False  # a request can switch speculation off, which is ours alone
    fields: dict[str, Any] = field(default_factory=dict)  # sent with every request

    @classmethod
    def connect(
        cls,
        url: str,
        *,
        model: str | None,
        api_key: str | None,
        timeout_s: float,
        concurrency: int,
        transport: httpx.BaseTransport | None = None,
    ) -> AuditClient:
        headers = {} if api_key is None else {"authorization": f"Bearer {api_key}"}
        base = url.rstrip("/").removesuffix("/v1")
        limits = httpx.Limits(max_connections=concurrency, max_keepalive_connections=concurrency)
        http = httpx.Client(base_url=base, headers=headers, timeout=timeout_s, limits=limits, transport=transport)
        try:
            listed = http.get("/v1/models").raise_for_status().json()["data"]
            client = cls(http, model or listed[0]["id"], concurrency)
            entries = [entry for entry in listed if entry["id"] == client.model]
            client.says_lossy = any(entry.get("lossless") is False for entry in entries)
            client.can_be_plain = any(entry.get("owned_by") == "draftsmith" for entry in entries)
            return client
        except (httpx.HTTPError, KeyError, IndexError, ValueError) as error:
            raise UserError(f"{base} does not answer /v1/models ({error}); check the URL and that the server runs") from error

    def without_speculation(self) -> AuditClient | None:
        """The same server, told not to speculate; None where it has no such switch."""
        return replace(self, fields={"speculation": {"k": 0}}) if self.can_be_plain else None

    def complete(self, prompt: str | list[int], **body: Any) -> Completion:
        return self.choices(prompt, **body)[0]

    def choices(self, prompt: str | list[int], **body: Any) -> list[Completion]:
        """The `n` choices of one request. Token ids are asked for as vLLM names them: text cannot tell tokens of equal text
        apart."""
        fields = {"model": self.model, "prompt": prompt, "return_tokens_as_token_ids": True, "logprobs": 0}
        fields |= {**self.fields, **body}
        try:
            response = self.http.post("/v1/completions", json=fields)
        except httpx.HTTPError as error:
            raise UserError(f"the server did not answer a completion ({error!r}); is it still running?") from error
        if response.status_code != 200:
            raise UserError(f"the server refused an audit request with {response.status_code}: {_message(response)}")
        try:
            told = [choice["logprobs"] or {} for choice in response.json()["choices"]]
        except (ValueError, KeyError, TypeError) as error:
            raise UserError(
                f"the server answered with no completion ({_message(response)}); audit one that speaks OpenAI"
            ) from error
        return [_completion(logprobs) for logprobs in told]

    def map(self, function: Callable[[Given], Answer], given: Sequence[Given]) -> list[Answer]:
        """`function` of every element, `concurrency` at a time, in order."""
        with ThreadPoolExecutor(self.concurrency) as pool:
            return list(pool.map(function, given))

    def drafted(self) -> int | None:
        """Draft tokens offered since the server started, by vLLM's counter; None where it has none."""
        try:
            response = self.http.get("/metrics")
        except httpx.HTTPError:
            return None
        counts = [
            float(line.rsplit(" ", 1)[1])
            for line in response.text.splitlines()
            if line.startswith("vllm:spec_decode_num_draft_tokens_total")
        ]
        return int(sum(counts)) if counts else None


def _completion(logprobs: dict[str, Any]) -> Completion:
    names, tops = logprobs.get("tokens") or [], logprobs.get("top_logprobs") or []
    return Completion([_token_id(name) for name in names], [_by_id(top) for top in tops])


def _token_id(name: str) -> int:
    if not name.startswith(ID_PREFIX):
        raise UserError(
            "the server does not name tokens by id (return_tokens_as_token_ids); audit one that does, as draftsmith and vLLM"
        )
    return int(name.removeprefix(ID_PREFIX))


def _by_id(top: dict[str, float] | None) -> dict[int, float]:
    return {_token_id(name): value for name, value in (top or {}).items()}


def _message(response: httpx.Response) -> str:
    try:
        body = response.json()
    except ValueError:
        return response.text[:200]
    error = body.get("error", body) if isinstance(body, dict) else body
    return str(error.get("message", error) if isinstance(error, dict) else error)[:300]
