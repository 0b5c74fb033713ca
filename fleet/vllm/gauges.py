"""Gauges of the draft, in the registry that vLLM's `/metrics` shows."""

from __future__ import annotations

from typing import Any

from draftsmith.fleet.log import once
from draftsmith.fleet.store.engine_status import EngineStatus

GAUGES = {
    "version": "version of the draft that is served",
    "alpha": "accepted of the drafted tokens reached, of the served version",
    "tau": "tokens per round, of the served version",
    "z": "z of the losslessness monitor, of the served version",
    "alarm": "1 where the losslessness monitor has enough evidence against the served version",
    "swap_pause_ms": "pause of the engine by the last swap",
    "refused_versions": "versions that this engine does not serve",
}


class Gauges:
    """Nothing where the Prometheus client is missing or refuses."""

    def __init__(self, engine: str):
        self.engine = engine
        self.gauges: dict[str, Any] = {}
        try:
            from prometheus_client import Gauge

            self.gauges = {
                name: Gauge(
                    f"draftsmith_draft_{name}",
                    help_text,
                    ["engine"],
                    multiprocess_mode="mostrecent",
                )
                for name, help_text in GAUGES.items()
            }
        except (ImportError, ValueError) as error:
            once(f"no gauges of the draft: {error}")

    def set(self, status: EngineStatus) -> None:
        values = {
            "version": status.version,
            "alpha": status.alpha,
            "tau": status.tau,
            "z": status.z,
            "alarm": float(status.alarm),
            "swap_pause_ms": status.last_swap.get("pause_ms"),
            "refused_versions": len(status.refused),
        }
        for name, gauge in self.gauges.items():
            value = values[name]
            if value is not None:
                gauge.labels(self.engine).set(value)
