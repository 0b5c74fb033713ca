"""Gauges of the draft in vLLM's own registry."""

from __future__ import annotations

import prometheus_client
import pytest
from prometheus_client import CollectorRegistry, Gauge, generate_latest

from draftsmith.fleet.store.layout import EngineStatus
from draftsmith.fleet.vllm.endpoint import Gauges


def test_gauges_have_the_status_and_an_alarm(monkeypatch: pytest.MonkeyPatch) -> None:
    registry = CollectorRegistry()

    def gauge(name: str, text: str, labels: list[str], multiprocess_mode: str) -> Gauge:
        return Gauge(name, text, labels, registry=registry)

    monkeypatch.setattr(prometheus_client, "Gauge", gauge)
    gauges = Gauges("one")
    for alarm in (True, False):
        status = EngineStatus(
            engine="one", version=7, alpha=0.5, tau=2.5, z=-6.0, alarm=alarm, refused={6: "torn"}
        )
        gauges.set(status)
        lines = generate_latest(registry).decode().splitlines()
        shown = dict(line.split(" ") for line in lines if not line.startswith("#"))
        expected = {"version": 7, "alpha": 0.5, "tau": 2.5, "z": -6, "refused_versions": 1}
        for name, value in (expected | {"alarm": alarm}).items():
            assert float(shown[f'draftsmith_draft_{name}{{engine="one"}}']) == value, name
