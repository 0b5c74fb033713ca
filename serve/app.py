"""The ASGI application: every endpoint of the server put together."""

from __future__ import annotations

from fastapi import FastAPI, Request, Response

from draftsmith.serve.dashboard.page import add_dashboard
from draftsmith.serve.http.completions import _answer, _extras
from draftsmith.serve.http.endpoints import (
    add_learning_endpoints,
    add_service_endpoints,
    add_token_endpoints,
)
from draftsmith.serve.http.errors import add_error_handlers
from draftsmith.serve.http.gate import Gate
from draftsmith.serve.http.protocol import ChatRequest, CompletionRequest
from draftsmith.serve.http.responses import chat_responder, completion_responder
from draftsmith.serve.http.schema import (
    ANSWER_STATUSES,
    ChatBody,
    CompletionBody,
    describe,
    documented,
    events_of,
)
from draftsmith.serve.http.server import Server
from draftsmith.serve.http.tokens import Prompt, completion_prompts
from draftsmith.version import __version__


def create_app(server: Server) -> FastAPI:
    app = FastAPI(title="draftsmith", version=__version__, docs_url=None, redoc_url=None)
    app.add_middleware(
        Gate, limits=server.limits, load=server.load, responded=server.metrics.responded
    )
    add_error_handlers(app)
    add_service_endpoints(app, server)
    add_token_endpoints(app, server)
    add_learning_endpoints(app, server)
    if server.dashboard is not None:
        add_dashboard(app, server, server.dashboard)

    @app.post(
        "/v1/completions", responses={**events_of(CompletionBody), **documented(*ANSWER_STATUSES)}
    )
    async def completions(body: CompletionRequest, request: Request) -> Response:
        server.check_model(body.model)
        prompts = await server.aside.run(
            lambda: completion_prompts(
                body.prompt, server.tokenizer, add_special_tokens=body.add_special_tokens
            )
        )
        responder = completion_responder(
            server.model, server.vocabulary, _extras(server, body), prompts, body.n or 1
        )
        return await _answer(server, request, body, prompts, responder)

    @app.post(
        "/v1/chat/completions", responses={**events_of(ChatBody), **documented(*ANSWER_STATUSES)}
    )
    async def chat(body: ChatRequest, request: Request) -> Response:
        server.check_model(body.model)
        prompt = Prompt(await server.aside.run(lambda: server.chat_prompt(body)), None)
        responder = chat_responder(
            server.model, server.vocabulary, _extras(server, body), prompt, body.n or 1
        )
        return await _answer(server, request, body, [prompt], responder)

    describe(app, model=server.model, guarded=bool(server.limits.api_keys))
    return app
