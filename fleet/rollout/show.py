"""`draftsmith fleet status`: all that is known of a fleet, read from its store, as JSON and as a
table; versions changed by hand."""

from __future__ import annotations

import dataclasses
import json
import sys
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict
from typing import Any

from draftsmith import files
from draftsmith.errors import UserError
from draftsmith.fleet.config import FleetConfig
from draftsmith.fleet.store.layout import EngineStatus, Rollout, StoreUnreachable, finite
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
    table = [HEADS, *(cells(row) for row in view["engines"])]
    widths = [max(len(line[column]) for line in table) for column in range(len(HEADS) - 1)]
    return [
        *summary(view),
        *(
            "  ".join([*map(str.ljust, line, widths), line[-1]]).rstrip()
            for line in (table if view["engines"] else ())
        ),
    ]


def summary(view: View) -> list[str]:
    live = "no version is live" if view["current"] is None else f"version {view['current']} is live"
    served = ", ".join(
        f"{count} on {'no version' if version == 'None' else f'version {version}'}"
        for version, count in view["served"].items()
    )
    silent = sum(row["is_silent"] for row in view["engines"])
    parts = [live, served or "no engine", *([f"{silent} silent"] if silent else [])]
    return ["; ".join(parts), *rollout_lines(view["rollout"])]


def rollout_lines(rollout: Any) -> list[str]:
    if not rollout:
        return []
    share = rollout["stages"][rollout["stage"] - 1]
    trial = rollout["trial"]
    found = ""
    if trial.get("pairs"):
        found = f"; gain {trial['gain']:+.4f} in {trial['pairs']} pairs of periods"
    elif trial.get("is_blind"):
        found = "; waits: too few requests of both versions are in the buffer"
    return [
        f"version {rollout['candidate']} is tried on {len(rollout['engines'])} engines, stage "
        f"{rollout['stage']} of {len(rollout['stages'])} ({share:.0%}), for "
        f"{duration(rollout['age_s'])}{found}"
    ]


def cells(row: View) -> tuple[str, ...]:
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
        note(row),
    )


def note(row: View) -> str:
    parts = ["silent"] if row["is_silent"] else []
    if row["alarm"]:
        parts.append("samples another distribution than the target's")
    if row["wanted"] is not None and row["wanted"] != row["version"]:
        parts.append(f"should serve {row['wanted']}")
    refused: Sequence[tuple[str, str]] = sorted(
        row["refused"].items(), key=lambda one: int(one[0]), reverse=True
    )
    parts += [f"refused {version}: {reason}" for version, reason in refused[:1]]
    return "; ".join(parts)


def number(value: Any, form: str, unit: str = "") -> str:
    return f"{value:{form}}{unit}" if isinstance(value, (int, float)) else "-"


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


KEPT_DECISIONS = 50


def promote(config: FleetConfig) -> int:
    """Makes a version live on all engines; by default the candidate of the rollout."""
    store = VersionStore(config.versions)
    rollout = running(store)
    version = config.version
    if version is None and rollout is not None:
        version = rollout.candidate
    if version is None:
        raise UserError(f"no rollout is on; give the --version to promote, one of {listed(store)}")
    make_live(store, version, "promoted by hand", about=version)
    print(f"version {version} is live for all engines")
    return 0


def rollback(config: FleetConfig) -> int:
    """Ends the rollout, which leaves the live version to all engines; without one the live
    version's parent, or the given version, becomes live."""
    store = VersionStore(config.versions)
    rollout, live = running(store), store.current()
    if rollout is not None and config.version is None:
        end(store, rollout, "rolled back by hand")
        print(f"version {rollout.candidate} is withdrawn; version {live} is live for all engines")
        return 0
    version = config.version if config.version is not None else parent_of(store, live)
    make_live(store, version, "rolled back by hand", about=live)
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


def running(store: VersionStore) -> Rollout | None:
    """The rollout that engines follow now."""
    rollout = store.rollout_or_none()
    is_on = rollout is not None and not rollout.is_over and rollout.live == store.current_or_none()
    return rollout if is_on else None


def make_live(store: VersionStore, version: int, decision: str, *, about: int | None) -> None:
    """One put of `current` ends a rollout; then the decision is logged."""
    rollout, live = store.rollout_or_none(), store.current_or_none()
    store.put_current(version)
    if rollout is None:
        rollout = Rollout(
            candidate=version, live=version if live is None else live, cut=0.0, stages=(1.0,)
        )
    reason = f"version {version} is live instead of {live}"
    end(store, rollout, decision, about=about, reason=reason)


def end(
    store: VersionStore,
    rollout: Rollout,
    decision: str,
    *,
    about: int | None = None,
    reason: str = "",
) -> None:
    """Ends a rollout, with a decision about its candidate or another version."""
    over = dataclasses.replace(rollout, is_over=True)
    store.put_rollout(decided(over, decision, about=about, reason=reason))


def decided(
    rollout: Rollout, decision: str, *, about: int | None = None, reason: str = ""
) -> Rollout:
    """`rollout` with a decision more, and the oldest forgotten."""
    entry = {
        "time_s": time.time(),
        "decision": decision,
        "version": rollout.candidate if about is None else about,
        "stage": rollout.stages[rollout.stage],
        "reason": reason,
    }
    return dataclasses.replace(rollout, decisions=(*rollout.decisions, entry)[-KEPT_DECISIONS:])


def listed(store: VersionStore) -> str:
    return ", ".join(map(str, store.versions())) or "none"
