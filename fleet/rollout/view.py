"""All that is known of a fleet, read from its store: plain JSON for programs, for the table and for
the page."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Mapping
from dataclasses import asdict
from typing import Any

from draftsmith.fleet.store.engine_status import EngineStatus, finite
from draftsmith.fleet.store.rollout import Rollout
from draftsmith.fleet.store.store import VersionStore

# Engines put a status at every poll: one that is older is of an engine that is gone or cannot
# reach the store.
SILENT_S = 120.0

View = Mapping[str, Any]


def view_of(store: VersionStore, *, now_s: float | None = None) -> dict[str, Any]:
    now_s = time.time() if now_s is None else now_s
    current, rollout, engines = store.current(), store.rollout_or_none(), store.engines()
    is_on = rollout is not None and not rollout.is_over and rollout.live == current
    rows = [row(status, current, rollout if is_on else None, now_s) for status in engines]
    served = Counter(str(status.version) for status in engines if now_s - status.at_s <= SILENT_S)
    return {
        "versions": store.url,
        "at_s": now_s,
        "current": current,
        "stored": store.versions(),
        "served": dict(sorted(served.items())),
        "rollout": rollout_view(rollout, engines, now_s) if rollout and is_on else None,
        "decisions": list(rollout.decisions) if rollout else [],
        "engines": rows,
    }


def row(
    status: EngineStatus, current: int | None, rollout: Rollout | None, now_s: float
) -> dict[str, Any]:
    wanted = rollout.version_for(status.engine, now_s) if rollout else current
    values = {name: finite(value) for name, value in asdict(status).items()}
    return {
        **values,
        "refused": {str(version): reason for version, reason in status.refused.items()},
        "wanted": wanted,
        "age_s": max(0.0, now_s - status.at_s),
        "is_silent": now_s - status.at_s > SILENT_S,
    }


def rollout_view(rollout: Rollout, engines: list[EngineStatus], now_s: float) -> dict[str, Any]:
    return {
        "candidate": rollout.candidate,
        "live": rollout.live,
        "stage": rollout.stage + 1,
        "stages": list(rollout.stages),
        "engines": [status.engine for status in engines if rollout.has(status.engine)],
        "switch_s": rollout.switch_s,
        "age_s": max(0.0, now_s - rollout.begun_s),
        "trial": dict(rollout.trial),
    }
