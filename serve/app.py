"""The ASGI application: all endpoints of the server, behind its request limits."""

from __future__ import annotations

from fastapi import FastAPI

from draftsmith.serve.dashboard.data import Source
from draftsmith.serve.dashboard.page import add_dashboard
from draftsmith.serve.http.completions import add_completion_endpoints
from draftsmith.serve.http.endpoints import (
    add_learning_endpoints,
    add_service_endpoints,
    add_speculation_endpoints,
    add_token_endpoints,
)
from draftsmith.serve.http.errors import add_error_handlers
from draftsmith.serve.http.limits import RequestLimits
from draftsmith.serve.http.schema import describe
from draftsmith.serve.http.server import Server
from draftsmith.serve.responses.endpoint import add_responses_endpoint
from draftsmith.version import __version__


def create_app(server: Server, dashboard: Source | None = None) -> FastAPI:
    app = FastAPI(title="draftsmith", version=__version__, docs_url=None, redoc_url=None)
    app.add_middleware(
        RequestLimits,
        limits=server.limits,
        load=server.load,
        responded=server.metrics.responded,
    )
    add_error_handlers(app)
    add_service_endpoints(app, server)
    add_token_endpoints(app, server)
    add_speculation_endpoints(app, server)
    add_learning_endpoints(app, server)
    add_completion_endpoints(app, server)
    add_responses_endpoint(app, server)
    if dashboard is not None:
        add_dashboard(app, dashboard)
    describe(app, model=server.model, guarded=bool(server.limits.api_keys))
    return app
