"""Data of `/dashboard`: facts and tables as text, and points over time; and the page, with
`/dashboard/data`, which it reads.

Rates are of the engine's plain counters, read by a thread beside it, so that history costs the
rounds nothing. Learning is read from files alone, because `serve` does not import `distill`.
"""

from __future__ import annotations

import math
import time
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from fastapi import FastAPI
from fastapi.responses import HTMLResponse, JSONResponse, RedirectResponse, Response

from draftsmith.drafters.versions import latest, read_decisions, read_manifest, versions
from draftsmith.errors import UserError
from draftsmith.files import read_json
from draftsmith.kernels.acceptance import AcceptanceCounts, label_of
from draftsmith.progress import duration, factor
from draftsmith.serve.engine.engine import EngineCore
from draftsmith.serve.stats import EngineStats, StatsReading

PAGE = Path(__file__).with_name("dashboard.html")
# Names and reasons come from clients and files: nothing is loaded from elsewhere and nothing goes
# there.
POLICY = (
    "default-src 'none'; script-src 'unsafe-inline'; style-src 'unsafe-inline'; img-src data:; "
    "connect-src 'self'; "
    "base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
)
EVERY_S = 5.0
POINTS = 180  # a quarter of an hour
WINDOW = 12  # readings between which a rate is: one minute
STATUS = "status.json"
DECISIONS_SHOWN, VERSIONS_SHOWN, STREAMS_SHOWN = 20, 8, 4
# What an operator should look at; everything else is the learner's daily work.
ALARMS = ("refuse", "rolled back", "drift", "quarantine")
# of the learner's monitor, as its status names them
EVENTS = ("accepted", "drafted", "replaced", "residual", "emitted")
ALARM, LIVE, PLAIN = "alarm", "live", ""  # marks of rows
SILENT_S = 180  # one update of the learner may take a minute on a busy machine
Point = dict[str, Any]  # `time_s`, `tokens_per_s`, `tau`, `alpha` and `version` of one moment
Told = dict[str, Any]


class History:
    """Points of the last quarter of an hour, and the readings that the next one is made of."""

    def __init__(self, engine: EngineCore):
        self.engine, self.points = engine, deque[Point](maxlen=POINTS)
        self._readings = deque([StatsReading.of(engine.stats)], maxlen=WINDOW + 1)

    def look(self) -> None:
        self._readings.append(StatsReading.of(self.engine.stats))
        passed = self._readings[-1].since(self._readings[0])
        generated = passed.totals["num_generation_tokens"]
        self.points.append(
            {
                "time_s": time.time(),
                "tokens_per_s": generated / max(1e-3, passed.time_s),
                "tau": passed.acceptance.tau,
                "alpha": passed.acceptance.alpha,
                "version": self.engine.stats.draft_version,
            }
        )


@dataclass
class Source:
    """State behind the page. `read` may be called from any thread."""

    history: History
    by_class: Mapping[str, AcceptanceCounts]
    model: str
    versions: str | None = None  # the folder that the server follows

    def __post_init__(self) -> None:
        self.started_s = time.time()

    def read(self) -> Told:
        engine = self.history.engine
        learner = None if self.versions is None else read_status(self.versions)
        decisions = [] if self.versions is None else decisions_in(self.versions)
        points = list(self.history.points)
        tables = [
            classes_table(self.by_class),
            contexts_table(engine.stats),
            versions_table(self.versions, engine.stats),
            lossless_table(learner),
            decisions_table(decisions),
        ]
        return {
            "model": self.model,
            "facts": list(facts(engine, points, learner, decisions, self.started_s)),
            "tables": [table for table in tables if table["rows"]],
            "points": points,
        }


def facts(
    engine: EngineCore,
    points: Sequence[Point],
    learner: Told | None,
    decisions: Sequence[Told],
    started_s: float,
) -> Iterator[tuple[str, str, str]]:
    """Label, text and mark of each."""
    stats, scheduler = engine.stats, engine.scheduler
    family = "no drafter" if engine.drafter is None else engine.drafter.family
    up = duration(max(0.0, time.time() - started_s))
    yield "draft", f"{family} {stats.draft_version or '-'}, up {up}", PLAIN
    load = f"{len(scheduler.running)} running, {len(scheduler.waiting)} waiting, cache "
    yield "requests", f"{load}{100 * scheduler.blocks.usage:.0f} % full", PLAIN
    now = points[-1] if points else {"tokens_per_s": None, "tau": None, "alpha": []}
    yield "tok/s", number(now["tokens_per_s"], 1), PLAIN
    yield "tau", number(now["tau"], 2), PLAIN
    yield "alpha", numbers(now["alpha"]), PLAIN
    if stats.seeded_share:
        seeded = f"{100 * stats.seeded_share:.1f} % of the tokens ({stats.num_seeded_requests} "
        yield "seeded", f"{seeded}requests) are neither learned from nor measured", PLAIN
    if learner is not None:
        silent = learner["age_s"] > SILENT_S
        working = "resting" if learner.get("resting") else "running"
        silence = duration(learner["age_s"])
        ended = f"stopped {silence} ago" if learner.get("stopped") else f"silent for {silence}"
        state = ended if silent or learner.get("stopped") else working
        counts = ", ".join(
            f"{learner.get(name, '-')} {name.replace('_', ' ')}"
            for name in ("updates", "texts", "fresh", "held_out", "published", "damaged_shards")
        )
        yield "learner", f"{state}: {counts}, loss {number(learner.get('loss'), 3)}", PLAIN
    count = sum(is_alarm(one) for one in decisions)
    count += int((learner or {}).get("lossless_alarms") or 0)
    yield "alarms", str(count), ALARM if count else PLAIN


def table_of(title: str, head: Sequence[str], rows: Sequence[tuple[str, Sequence[str]]]) -> Told:
    """`rows`: the mark and the cells of each."""
    marked = [{"mark": mark, "cells": list(cells)} for mark, cells in rows]
    return {"title": title, "head": list(head), "rows": marked}


def rates(counts: AcceptanceCounts | None) -> tuple[str, str, str]:
    found = counts or AcceptanceCounts()
    return str(found.rounds), number(found.tau, 2), numbers(found.alpha)


RATES = ("rounds", "tau", "alpha by position")


def classes_table(by_class: Mapping[str, AcceptanceCounts]) -> Told:
    named = sorted(dict(by_class).items())
    rows = [(PLAIN, (name or "(no class)", *rates(counts))) for name, counts in named]
    return table_of("Classes of requests", ("class", *RATES), rows)


def contexts_table(stats: EngineStats) -> Told:
    rows = [(PLAIN, (label_of(at), *rates(counts))) for at, counts in stats.by_context.items()]
    return table_of("Tokens before the round", ("context", *RATES), rows if len(rows) > 1 else [])


def versions_table(root: str | None, stats: EngineStats) -> Told:
    """Newest versions with what their gate saw and what was served of them."""
    rows = []
    for one, is_live in reversed(published(root) if root is not None else []):
        gate = one.get("gate") or {}
        name = f"{one['version']}{' live' if is_live else ''}"
        change = (number(gate.get(f"alpha_{of}"), 4) for of in ("live", "candidate"))
        evidence = number(gate.get("gain"), 4), number(gate.get("p_value"), 5)
        served = rates(stats.by_version.get(str(one["version"])))
        rows.append((LIVE if is_live else PLAIN, (name, " -> ".join(change), *evidence, *served)))
    return table_of("Versions", ("version", "gate: alpha", "gain", "p", *RATES), rows)


def published(root: str) -> list[tuple[Told, bool]]:
    """Manifests of the newest versions, and whether each is live."""
    try:
        present, live = versions(root)[-VERSIONS_SHOWN:], latest(root)
    except (OSError, UserError):
        # A shared folder may be away for a moment; the watcher logs it.
        return []
    found = []
    for version in present:
        try:
            found.append((read_manifest(root, version), version == live))
        except (OSError, UserError):
            continue  # pruned since it was listed, or damaged; the watcher logs it
    return found


def lossless_table(learner: Told | None) -> Told:
    """Streams of the learner's monitor: those with an alarm, and the latest ones."""
    streams = (learner or {}).get("losslessness") or {}
    quiet = [name for name, one in streams.items() if not one.get("alarm")]
    latest_quiet = quiet[-STREAMS_SHOWN:]
    rows = [
        (
            ALARM if one.get("alarm") else PLAIN,
            (
                name,
                "NOT LOSSLESS" if one.get("alarm") else "",
                str(one.get("positions", 0)),
                "-" if one.get("log10_evidence") is None else factor(one["log10_evidence"]),
                *(number(one.get(f"z_{event}"), 1) for event in EVENTS),
            ),
        )
        for name, one in streams.items()
        if one.get("alarm") or name in latest_quiet
    ]
    head = ("records", "", "positions", "evidence", *(f"z {event}" for event in EVENTS))
    return table_of("Losslessness of records", head, rows)


def decisions_table(decisions: Sequence[Told]) -> Told:
    rows = [
        (
            ALARM if is_alarm(one) else PLAIN,
            (
                time.strftime("%m-%d %H:%M:%S", time.localtime(one.get("time_s") or 0.0)),
                str(one.get("decision", "")),
                "-" if one.get("version") is None else str(one["version"]),
                number(one.get("gain"), 4),
                str(one.get("reason", "")),
            ),
        )
        for one in reversed(decisions)
    ]
    return table_of("Decisions", ("time", "decision", "version", "gain", "reason"), rows)


def is_alarm(decision: Told) -> bool:
    return str(decision.get("decision", "")).startswith(ALARMS)


def decisions_in(root: str) -> list[Told]:
    """Latest decisions, oldest first."""
    try:
        return read_decisions(root, DECISIONS_SHOWN)
    except (OSError, UserError):
        return []


def read_status(root: str) -> Told | None:
    try:
        status = read_json(Path(root) / STATUS)
    except (OSError, UserError):
        return None
    return status | {"age_s": max(0.0, time.time() - (status.get("time_s") or 0.0))}


def number(value: Any, digits: int) -> str:
    is_known = isinstance(value, (int, float)) and math.isfinite(value)
    return f"{value:.{digits}f}" if is_known else "-"


def numbers(values: Sequence[float | None]) -> str:
    return " ".join(number(value, 2) for value in values) or "-"


def add_dashboard(app: FastAPI, source: Source) -> None:
    page = PAGE.read_text(encoding="utf-8")

    @app.get("/", include_in_schema=False)
    async def lead() -> Response:
        return RedirectResponse("dashboard")

    @app.get("/dashboard", include_in_schema=False)
    async def show() -> Response:
        return HTMLResponse(
            page, headers={"content-security-policy": POLICY, "cache-control": "no-cache"}
        )

    # No coroutine, so that reading files happens on a thread beside the event loop's.
    @app.get("/dashboard/data", include_in_schema=False)
    def data() -> Response:
        return JSONResponse(source.read(), headers={"cache-control": "no-store"})
