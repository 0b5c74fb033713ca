"""`draftsmith doctor --url` of servers that run: a good one, one with a strange draft."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import pytest

from draftsmith.drafters.heads.eagle3 import Eagle3
from draftsmith.drafters.options import Eagle3Options
from draftsmith.drafters.target.target import Target
from draftsmith.drafters.text.suffix import Suffix
from draftsmith.serve.config import EngineConfig
from draftsmith.train.check.doctor import run
from draftsmith.train.config import DoctorConfig

PROMPT = [7, 8, 9] * 5
OPTIONS = {"temperature": 0, "max_tokens": 120, "ignore_eos": True}


@pytest.fixture
def ask(capsys: pytest.CaptureFixture[str]) -> Callable[..., dict[str, dict[str, str]]]:
    """Findings by check; the exit status must agree with them."""

    def ask(url: str, **options: Any) -> dict[str, dict[str, str]]:
        capsys.readouterr()
        status = run(DoctorConfig(url=url, json=True, **options))
        report = json.loads(capsys.readouterr().out)
        assert status == (1 if report["fail"] else 0)
        return {finding["check"]: finding for finding in report["findings"]}

    return ask


def test_a_pair_that_does_well(target: Target, live_server: Callable, ask: Callable) -> None:
    server = live_server(target, Suffix(), EngineConfig(k=2))
    assert ask(server.url)["server.traffic"]["status"] == "warn"
    for _ in range(2):
        server.complete(PROMPT, **OPTIONS).raise_for_status()
    findings = ask(server.url + "/v1")
    assert {finding["status"] for finding in findings.values()} <= {"ok", "warn"}
    for check in ("server.health", "server.traffic", "drafting.fallbacks"):
        assert findings[check]["status"] == "ok", findings[check]
    # The numbers are the engine's own.
    stats = server.engine.stats.acceptance
    told = findings["drafting.acceptance"]["what"]
    if stats.rounds >= 100:
        assert told.startswith(f"tau {stats.tau:.2f}, alpha by position {stats.alpha[0]:.2f}")
    else:
        assert told.startswith(f"only {stats.rounds} rounds")


def test_a_draft_that_knows_nothing_fails(
    target: Target, live_server: Callable, ask: Callable
) -> None:
    server = live_server(
        target, Eagle3.create(Eagle3Options(), target, seed=1).eval(), EngineConfig(k=3)
    )
    for _ in range(2):
        server.complete(PROMPT, **OPTIONS).raise_for_status()
    findings = ask(server.url)
    assert findings["drafting.acceptance"]["status"] == "fail"
    assert findings["drafting.payoff"]["status"] == "warn"
    assert "at best 0." in findings["drafting.payoff"]["what"]
