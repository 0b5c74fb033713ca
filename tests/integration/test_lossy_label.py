"""Typical acceptance and a wrong q change answers: every response, the metrics and the audit say so,
and nobody says it without."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from draftsmith.drafters.target.target import Target
from draftsmith.drafters.text.ngram import Ngram
from draftsmith.serve.audit.client import AuditClient
from draftsmith.serve.audit.command import declared
from draftsmith.serve.audit.config import AuditConfig
from draftsmith.serve.config import EngineConfig
from tests.stand_in_drafts import near

MESSAGES = [{"role": "user", "content": "hello"}]


def connect(server: Any) -> AuditClient:
    return AuditClient.connect(AuditConfig(), server.url)


def answers(server: Any) -> list[dict[str, Any]]:
    """A response of each endpoint, whole and in chunks."""
    bodies = []
    for path, prompt in (
        ("/v1/completions", {"prompt": "hello"}),
        ("/v1/chat/completions", {"messages": MESSAGES}),
    ):
        body = {"max_tokens": 3, "ignore_eos": True, **prompt}
        bodies.append(server.http.post(path, json=body).json())
        bodies += server.events(path, **body)
    return bodies


@pytest.mark.parametrize(
    "wrong", [{"verification": "typical"}, {"synthetic_acceptance": (0.5, 0.5)}], ids=str
)
def test_a_lossy_server_says_so_everywhere(
    wrong: dict[str, Any], target: Target, live_server: Callable
) -> None:
    server = live_server(target, near(target), EngineConfig(k=2, compile="off", **wrong))
    bodies = answers(server)
    assert len(bodies) > 4 and all(body["lossless"] is False for body in bodies)
    assert server.metric("draftsmith_lossless") == 0
    assert server.http.get("/health").headers["x-draftsmith-lossless"] == "false"
    assert server.http.get("/v1/models").json()["data"][0]["lossless"] is False
    assert "lossless" not in server.complete("hello", max_tokens=2, speculation={"k": 0}).json()
    (check,) = declared(connect(server))
    assert not check.passed and check.kind == "check"


@pytest.mark.parametrize("drafter, rule", [(Ngram(), "chain"), (None, "typical")])
def test_where_nothing_can_be_lossy_nothing_says_so(
    drafter: Ngram | None, rule: str, target: Target, live_server: Callable
) -> None:
    server = live_server(target, drafter, EngineConfig(k=2, verification=rule, compile="off"))
    assert not any("lossless" in body for body in answers(server))
    assert server.metric("draftsmith_lossless") == 1
    assert declared(connect(server)) == []
