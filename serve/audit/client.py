"""Requests of an audit to an OpenAI-compatible server: token ids in, token ids and logprobs out."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple, TypeVar

import httpx

from draftsmith.client import COUNTER, base_of, bearer, message_of, parse, remedy_of, send
from draftsmith.errors import UserError
from draftsmith.serve.audit.config import AuditConfig

ID_PREFIX = "token_id:"
MAX_LOGPROBS = 20
LEAST_CONNECTIONS = 6
Given = TypeVar("Given")
Answer = TypeVar("Answer")


class AuditCompletion(NamedTuple):
    tokens: list[int]
    # of each token: logprobs of the likeliest tokens, by id; empty when none were asked for
    top: list[dict[int, float]]
    # of its rounds, where the server was asked for it and makes one
    report: dict[str, Any] | None = None


class AuditCounters(NamedTuple):
    """Counts since the server started, under vLLM's names."""

    draft_tokens: int
    drafts: int  # rounds that drafted
    accepted: list[int]  # by draft position

    def since(self, before: AuditCounters) -> AuditCounters:
        earlier = [*before.accepted, *[0] * (len(self.accepted) - len(before.accepted))]
        accepted = [now - then for now, then in zip(self.accepted, earlier, strict=True)]
        return AuditCounters(
            self.draft_tokens - before.draft_tokens, self.drafts - before.drafts, accepted
        )


@dataclass
class AuditClient:
    http: httpx.Client
    model: str
    concurrency: int = 8
    # a request can switch speculation off and ask for a report of its rounds: draftsmith alone
    controls_rounds: bool = False
    # the most tokens that a round may keep; None where the server does not report it
    draft_depth: int | None = None
    # the most that a round offers, more than it may keep where drafts are trees; 0 where the
    # server does not report it
    draft_tokens: int = 0
    # most tokens of a text; None where the server does not report it
    max_length: int | None = None
    fields: dict[str, Any] = field(default_factory=dict)  # sent with every request

    @classmethod
    def connect(
        cls,
        config: AuditConfig,
        url: str,
        model: str | None = None,
        transport: httpx.BaseTransport | None = None,
    ) -> AuditClient:
        base = base_of(url)
        # For requests that must be in flight at once.
        connections = max(config.concurrency, LEAST_CONNECTIONS)
        limits = httpx.Limits(max_connections=connections, max_keepalive_connections=connections)
        http = httpx.Client(
            base_url=base,
            headers=bearer(config.api_key),
            timeout=config.timeout_s,
            limits=limits,
            transport=transport,
        )
        try:
            listed = http.get("/v1/models").raise_for_status().json()["data"]
            client = cls(http, model or listed[0]["id"], config.concurrency)
            entry: dict[str, Any] = next((one for one in listed if one["id"] == client.model), {})
            client.controls_rounds = entry.get("owned_by") == "draftsmith"
            client.draft_depth = entry.get("max_draft_depth")
            client.max_length = entry.get("max_model_len")
            client.draft_tokens = entry.get("max_draft_tokens", 0)
            return client
        except (httpx.HTTPError, KeyError, IndexError, ValueError) as error:
            raise UserError(
                f"{base} does not answer /v1/models ({error}); check the URL and that the server "
                "runs, or give --model"
            ) from error

    def without_speculation(self) -> AuditClient | None:
        """The same server, its requests without drafts; None where it has no such switch."""
        return replace(self, fields={"speculation": {"k": 0}}) if self.controls_rounds else None

    def reporting(self, k: int | None) -> AuditClient:
        """The same server, its requests with reports of their rounds, and with `k` draft tokens a
        round if it is given."""
        speculation = {"report": True} | ({} if k is None else {"k": k})
        return replace(self, fields={"speculation": speculation}) if self.controls_rounds else self

    def tokens_of(self, chat: dict[str, Any]) -> list[int]:
        """Ids of a chat by the server's template, up to where the answer begins."""
        try:
            response = send(
                self.http.send,
                self.http.build_request("POST", "/tokenize", json={"model": self.model, **chat}),
            )
            return list(response.raise_for_status().json()["tokens"])
        except (httpx.HTTPError, KeyError, TypeError, ValueError) as error:
            raise UserError(
                f"the server makes no token ids of a chat at /tokenize ({error}); audit one that "
                "does, as draftsmith and vLLM, or leave suite out"
            ) from error

    def complete(self, prompt: str | list[int], **body: Any) -> AuditCompletion:
        return self.choices(prompt, **body)[0]

    def choices(self, prompt: str | list[int], **body: Any) -> list[AuditCompletion]:
        """The `n` choices of one request. Token ids are requested as vLLM names them, since text
        cannot distinguish tokens of equal text."""
        fields = {
            "model": self.model,
            "prompt": prompt,
            "return_tokens_as_token_ids": True,
            "logprobs": 0,
        }
        fields |= {**self.fields, **body}
        try:
            request = self.http.build_request("POST", "/v1/completions", json=fields)
            response = send(self.http.send, request)
        except httpx.HTTPError as error:
            raise UserError(
                f"the server did not answer a completion ({error!r}); {remedy_of(error)}"
            ) from error
        if response.status_code != 200:
            raise UserError(
                f"the server refused an audit request with {response.status_code}: "
                f"{message_of(response.content)}"
            )
        try:
            answer = response.json()
            logprobs = [choice["logprobs"] or {} for choice in answer["choices"]]
        except (ValueError, KeyError, TypeError) as error:
            raise UserError(
                f"the server answered with no completion ({message_of(response.content)}); audit "
                "one with OpenAI's API"
            ) from error
        return [
            _completion(entry, report)
            for entry, report in zip(logprobs, _reports(answer, len(logprobs)), strict=True)
        ]

    def map(self, function: Callable[[Given], Answer], given: Sequence[Given]) -> list[Answer]:
        """Results of `function` for every element, in order, `concurrency` at a time."""
        with ThreadPoolExecutor(self.concurrency) as pool:
            return list(pool.map(function, given))

    def counters(self) -> AuditCounters | None:
        """Counters of the server; None where it counts no draft tokens, as one without
        speculation."""
        try:
            found = parse(self.http.get("/metrics").text)
        except (httpx.HTTPError, UserError):
            return None
        drafted, drafts, accepted = map(
            COUNTER.format, ("draft_tokens", "drafts", "accepted_tokens_per_pos")
        )
        if not found.has(drafted):
            return None
        kept = {int(at): int(count) for at, count in found.by(accepted, "position").items() if at}
        return AuditCounters(
            int(found.total(drafted)),
            int(found.total(drafts)),
            [kept.get(at, 0) for at in range(max(kept, default=-1) + 1)],
        )


def _reports(answer: dict[str, Any], count: int) -> list[dict[str, Any] | None]:
    """Report of each choice; None for a choice without one."""
    metrics = answer.get("metrics") or {}
    reports = metrics.get("choices") or [metrics.get("speculative_decoding")]
    return reports if len(reports) == count else [None] * count


def _completion(logprobs: dict[str, Any], report: dict[str, Any] | None) -> AuditCompletion:
    names, tops = logprobs.get("tokens") or [], logprobs.get("top_logprobs") or []
    return AuditCompletion(
        [_token_id(name) for name in names], [_by_id(top) for top in tops], report
    )


def _token_id(name: str) -> int:
    if not name.startswith(ID_PREFIX):
        raise UserError(
            "the server does not name tokens by id (return_tokens_as_token_ids); audit one that "
            "does, as draftsmith and vLLM"
        )
    return int(name.removeprefix(ID_PREFIX))


def _by_id(top: dict[str, float] | None) -> dict[int, float]:
    return {_token_id(name): value for name, value in (top or {}).items()}
