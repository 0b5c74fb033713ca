"""The page at `/dashboard`, and `/dashboard/data`, which it and `draftsmith top` read."""

from __future__ import annotations

from pathlib import Path

from fastapi import FastAPI
from fastapi.responses import HTMLResponse, JSONResponse, RedirectResponse, Response

from draftsmith.serve.dashboard.data import Source

PAGE = Path(__file__).with_name("dashboard.html")
# Names and reasons come from clients and files: nothing is loaded from elsewhere and nothing goes
# there.
POLICY = (
    "default-src 'none'; script-src 'unsafe-inline'; style-src 'unsafe-inline'; img-src data:; "
    "connect-src 'self'; "
    "base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
)


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
