"""`draftsmith fleet status`: all that is known of a fleet, read from its store, as JSON and as a
table; versions changed by hand."""

from __future__ import annotations

import json
import sys
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from draftsmith import files
from draftsmith.errors import UserError
from draftsmith.fleet.config import FleetConfig
from draftsmith.fleet.store.layout import EngineStatus, StoreUnreachable
from draftsmith.fleet.store.store import VersionStore
from draftsmith.progress import duration

CLEAR = "\x1b[H\x1b[2J"
HEADS = ("engine", "version", "alpha", "tau", "tok/s", "z", "last swap", "seen", "note")
# Engines put a status at every poll: one that is older is of an engine that is gone or cannot
# reach the store.
SILENT_S = 120.0
View = Mapping[str, Any]


def status(config: FleetConfig) -> int:
    clear = CLEAR if config.watch and sys.stdout.isatty() and not config.json else ""

    def show(view: View) -> None:
        shown = json.dumps(files.plain(view)) if config.json else "\n".join(lines(view))
        print(clear + shown, flush=True)

    return look(config, show)


def look(config: FleetConfig, show: Callable[[View], None]) -> int:
    """Shows a fleet once, or every `every_s` until interrupted. A store that is away for a moment
    ends only the first look."""
    store = VersionStore(config.versions)
    show(view_of(store))
    while config.watch:
        time.sleep(config.every_s)
        try:
            show(view_of(store))
        except StoreUnreachable as error:
            print(f"fleet: {error}", file=sys.stderr, flush=True)
    return 0


def lines(view: View) -> list[str]:
    rows = [cells(row, view["current"]) for row in view["engines"]]
    return [summary(view), *(files.markdown_table(HEADS, rows) if rows else ())]


def summary(view: View) -> str:
    none = f"no version is live in {view['versions']}"
    live = none if view["current"] is None else f"version {view['current']} is live"
    served = ", ".join(
        f"{count} on {'no version' if version == 'None' else f'version {version}'}"
        for version, count in view["served"].items()
    )
    silent = sum(row["is_silent"] for row in view["engines"])
    parts = [live, served or "no engine", *([f"{silent} silent"] if silent else [])]
    return "; ".join(parts)


def cells(row: View, current: int | None) -> tuple[str, ...]:
    swap = row["last_swap"] or {}
    return (
        str(row["engine"]),
        "-" if row["version"] is None else str(row["version"]),
        number(row["alpha"], ".3f"),
        number(row["tau"], ".2f"),
        number(row["tokens_per_s"], ".0f"),
        number(row["z"], "+.1f"),
        number(swap.get("pause_ms"), ".1f", " ms") if swap.get("ok", True) else "failed",
        f"{duration(row['age_s'])} ago",
        note(row, current),
    )


def note(row: View, current: int | None) -> str:
    parts = ["silent"] if row["is_silent"] else []
    if row["alarm"]:
        parts.append("samples another distribution than the target's")
    if current is not None and current != row["version"]:
        parts.append(f"should serve {current}")
    refused: Sequence[tuple[str, str]] = sorted(
        row["refused"].items(), key=lambda one: int(one[0]), reverse=True
    )
    parts += [f"refused {version}: {reason}" for version, reason in refused[:1]]
    return "; ".join(parts)


def number(value: Any, form: str, unit: str = "") -> str:
    return f"{value:{form}}{unit}" if isinstance(value, (int, float)) else "-"


def view_of(store: VersionStore) -> dict[str, Any]:
    now_s, engines = time.time(), store.engines()
    served = Counter(str(status.version) for status in engines if now_s - status.at_s <= SILENT_S)
    return {
        "versions": store.url,
        "at_s": now_s,
        "current": store.current(),
        "stored": store.versions(),
        "served": dict(sorted(served.items())),
        "engines": [row(status, now_s) for status in engines],
    }


def row(status: EngineStatus, now_s: float) -> dict[str, Any]:
    return {
        **json.loads(status.to_json()),
        "age_s": max(0.0, now_s - status.at_s),
        "is_silent": now_s - status.at_s > SILENT_S,
    }


def promote(config: FleetConfig) -> int:
    """Makes a version live on all engines."""
    store, version = VersionStore(config.versions), config.version
    if version is None:
        raise UserError(f"give the --version to promote, one of {listed(store)}")
    store.put_current(version)
    print(f"version {version} is live for all engines")
    return 0


def rollback(config: FleetConfig) -> int:
    """Makes the live version's parent live, or the given version."""
    store = VersionStore(config.versions)
    live = store.current()
    version = config.version if config.version is not None else parent_of(store, live)
    store.put_current(version)
    print(f"version {version} is live for all engines instead of {live}")
    return 0


def parent_of(store: VersionStore, live: int | None) -> int:
    if live is None:
        raise UserError(f"{store.url!r} has no live version; give --version to fleet promote")
    parent = store.manifest(live).get("parent")
    if parent is None:
        raise UserError(
            f"version {live} has no parent to go back to; give the --version, one of "
            f"{listed(store)}"
        )
    return int(parent)


def listed(store: VersionStore) -> str:
    return ", ".join(map(str, store.versions())) or "none"
