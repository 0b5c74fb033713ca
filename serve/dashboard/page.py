"""The page at `/dashboard`, the state behind it, and the endpoints that it reads:
`/dashboard/data`, and `/dashboard/text` where the server shows text."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import AsyncIterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from fastapi import FastAPI
from fastapi.responses import HTMLResponse, JSONResponse, Response, StreamingResponse

from draftsmith.kernels.contexts import label_of
from draftsmith.serve.dashboard.learning import Learning, drafts
from draftsmith.serve.dashboard.live_text import TextView, pieces
from draftsmith.serve.dashboard.samples import NOW_S, Counts, History, by_class, summary
from draftsmith.serve.dashboard.schema import DashboardBody
from draftsmith.serve.http.errors import Refusal
from draftsmith.serve.http.schema import documented
from draftsmith.serve.http.server import Server
from draftsmith.version import __version__

PAGE = Path(__file__).with_name("dashboard.html")
TEXT_POLL_S = 0.2
# A page that is left open must not hold up a shutdown, which waits for open streams; it asks again.
TEXT_STREAM_S = 5.0
# The page shows what users wrote: nothing is loaded from elsewhere and nothing goes there.
POLICY = (
    "default-src 'none'; script-src 'unsafe-inline'; style-src 'unsafe-inline'; img-src data:; "
    "connect-src 'self'; "
    "base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
)


@dataclass
class Dashboard:
    """State behind the page: history of rates, progress of learning, text where it is shown."""

    history: History
    learning: Learning = field(default_factory=Learning)
    text: TextView | None = None
    started_s: float = field(default_factory=time.time)


def add_dashboard(app: FastAPI, server: Server, dashboard: Dashboard) -> None:
    page = PAGE.read_text(encoding="utf-8")

    @app.get("/dashboard", include_in_schema=False)
    async def show() -> Response:
        return HTMLResponse(
            page, headers={"content-security-policy": POLICY, "cache-control": "no-cache"}
        )

    # No coroutine, so that reading files happens on a thread beside the event loop's.
    @app.get(
        "/dashboard/data",
        responses={**documented(200, model=DashboardBody), **documented(400, 401)},
    )
    def data(since: float = 0.0, span: Literal["recent", "day"] = "recent") -> Response:
        """Points that ended after `since` (seconds since the epoch), and all other
        values of now."""
        return JSONResponse(
            data_of(server, dashboard, since, span), headers={"cache-control": "no-store"}
        )

    @app.get("/dashboard/text", include_in_schema=False)
    async def text(after: int = 0) -> Response:
        if dashboard.text is None:
            raise Refusal(
                404, "this server shows no text; start it with --dashboard-text", code="no_text"
            )
        events = _text_events(server, dashboard.text, after)
        return StreamingResponse(
            events, media_type="text/event-stream", headers={"cache-control": "no-store"}
        )


def data_of(
    server: Server, dashboard: Dashboard, since: float, span: Literal["recent", "day"]
) -> dict[str, Any]:
    history, engine = dashboard.history, server.loop.engine
    kept = {"recent": history.recent, "day": history.day}[span]
    recent, learning = history.recent.since(0.0), dashboard.learning.read()
    return {
        "server": _identity(server, dashboard),
        "now": summary(history.recent.since(time.time() - NOW_S)),
        "classes": by_class(recent),
        "served": {
            version: Counts.of(counts).rates()
            for version, counts in engine.stats.by_version.items()
        },
        "contexts": {
            label_of(bucket): Counts.of(counts).rates()
            for bucket, counts in engine.stats.by_context.items()
        },
        "drafts": drafts(engine.stats, engine.drafts.router.canary_share, learning["learner"]),
        "points": kept.since(since),
        **learning,
    }


def _identity(server: Server, dashboard: Dashboard) -> dict[str, Any]:
    engine = server.loop.engine
    scheduler, stats = engine.scheduler, engine.stats
    return {
        "model": server.model,
        "version": __version__,
        "time_s": time.time(),
        "started_s": dashboard.started_s,
        "lossless": engine.lossless,
        "drafter": None if engine.drafter is None else engine.drafter.family,
        "draft_version": stats.draft_version,
        "running": len(scheduler.running),
        "waiting": len(scheduler.waiting),
        "kv_usage": scheduler.blocks.usage,
        "records": engine.recorder.num_records,
        "seeded_requests": stats.num_seeded_requests,
        "seeded_share": stats.seeded_share,
        "swaps": stats.num_swaps,
        "shows_text": dashboard.text is not None,
    }


async def _text_events(server: Server, view: TextView, after: int) -> AsyncIterator[str]:
    end_s = time.monotonic() + TEXT_STREAM_S
    while time.monotonic() < end_s:
        for shown in view.after(after):
            after = shown.number
            # The event loop's own copy of the vocabulary.
            body = pieces(shown, server.vocabulary)
            yield f"id: {after}\ndata: {json.dumps(body)}\n\n"
        await asyncio.sleep(TEXT_POLL_S)
