"""Endpoints about the server itself: health, version, models, load, metrics."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from fastapi import FastAPI, Response

from draftsmith.serve.http.schema import LoadBody, Model, ModelList, VersionBody, documented
from draftsmith.version import __version__

if TYPE_CHECKING:
    from draftsmith.serve.http.completions import Server

LOSSLESS_HEADER = "x-draftsmith-lossless"  # of /health, where answers need not have the target's distribution
METRICS_TYPE = "text/plain; version=0.0.4; charset=utf-8"
METRICS_DOCUMENT: dict[int | str, dict[str, Any]] = {200: {"content": {"text/plain": {"schema": {"type": "string"}}}}}
HEALTH_DOCUMENT: dict[int | str, dict[str, Any]] = {
    200: {"description": "The engine runs."},
    503: {"description": "The engine does not run; restart the server."},
}


def add_service_endpoints(app: FastAPI, server: Server) -> None:
    @app.get("/ping", response_class=Response, responses=HEALTH_DOCUMENT, operation_id="ping")
    @app.get("/health", response_class=Response, responses=HEALTH_DOCUMENT)
    async def health() -> Response:
        lossy = {} if server.loop.engine.lossless else {LOSSLESS_HEADER: "false"}
        return Response(status_code=200 if server.loop.healthy else 503, headers=lossy)

    @app.get("/version", responses=documented(200, model=VersionBody))
    async def version() -> dict[str, str]:
        return {"version": __version__}

    @app.get("/load", responses=documented(200, model=LoadBody))
    async def load() -> dict[str, int]:
        return {"server_load": server.load.num_answering}

    @app.get("/metrics", response_class=Response, responses=METRICS_DOCUMENT)
    async def metrics() -> Response:
        return Response(server.metrics.text(), media_type=METRICS_TYPE)

    @app.get("/v1/models", responses={**documented(200, model=ModelList), **documented(401)})
    async def models() -> dict[str, Any]:
        return {"object": "list", "data": [_model(server)]}

    @app.get("/v1/models/{model:path}", responses={**documented(200, model=Model), **documented(401, 404)})
    async def model(model: str) -> dict[str, Any]:
        server.check_model(model)
        return _model(server)


def _model(server: Server) -> dict[str, Any]:
    entry = {"id": server.model, "object": "model", "created": server.created, "owned_by": "draftsmith"}
    engine = server.loop.engine
    entry |= {"root": engine.target.name, "parent": None, "max_model_len": engine.max_length}
    entry["max_draft_depth"], entry["max_draft_tokens"] = engine.max_draft_depth, engine.max_draft_tokens
    return entry if engine.lossless else entry | {"lossless": False}
