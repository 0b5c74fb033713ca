"""Endpoints beside completions: the service (health, version, models, load, metrics), its
tokenizer, the drafting of running requests, and the deletion of records that learning would use."""

from __future__ import annotations

from typing import Annotated, Any

from fastapi import Body, FastAPI, Request, Response
from pydantic import Discriminator, Field, Tag

from draftsmith.serve.control.control import MAX_K
from draftsmith.serve.http.bodies import ConversationBody, FunctionTool, StrictModel, Text
from draftsmith.serve.http.chat import chat_prompt
from draftsmith.serve.http.errors import Refusal
from draftsmith.serve.http.protocol import TokenIds
from draftsmith.serve.http.schema import documented
from draftsmith.serve.http.server import Server
from draftsmith.serve.http.streams import drafting_state
from draftsmith.serve.http.tokens import encode
from draftsmith.version import __version__

METRICS_TYPE = "text/plain; version=0.0.4; charset=utf-8"
METRICS_DOCUMENT: dict[int | str, dict[str, Any]] = {
    200: {"content": {"text/plain": {"schema": {"type": "string"}}}}
}
HEALTH_DOCUMENT: dict[int | str, dict[str, Any]] = {
    200: {"description": "The engine runs."},
    503: {"description": "The engine does not run; restart the server."},
}


def add_service_endpoints(app: FastAPI, server: Server) -> None:
    @app.get("/ping", response_class=Response, responses=HEALTH_DOCUMENT, operation_id="ping")
    @app.get("/health", response_class=Response, responses=HEALTH_DOCUMENT)
    async def health() -> Response:
        return Response(status_code=200 if server.loop.healthy else 503)

    @app.get("/version", responses=documented(200))
    async def version() -> dict[str, str]:
        return {"version": __version__}

    @app.get("/load", responses=documented(200))
    async def load() -> dict[str, int]:
        return {"server_load": server.load.num_answering}

    @app.get("/metrics", response_class=Response, responses=METRICS_DOCUMENT)
    async def metrics() -> Response:
        return Response(server.metrics.text(), media_type=METRICS_TYPE)

    @app.get("/v1/models", responses=documented(200, 401))
    async def models() -> dict[str, Any]:
        return {"object": "list", "data": [_model(server, name) for name in server.models]}

    @app.get("/v1/models/{model:path}", responses=documented(200, 401, 404))
    async def model(model: str) -> dict[str, Any]:
        return _model(server, server.check_model(model))


def _model(server: Server, name: str) -> dict[str, Any]:
    engine = server.loop.engine
    return {
        "id": name,
        "object": "model",
        "created": server.created,
        "owned_by": "draftsmith",
        "root": engine.target.name,
        "parent": None if name == server.model else server.model,
        "max_model_len": engine.max_length,
        "max_draft_depth": engine.max_draft_depth,
        "max_draft_tokens": engine.max_draft_tokens,
    }


MOST_DECODED = 2**16  # tokens of a request, where the context is shorter
TOKEN_STATUSES = (200, 400, 401, 404, 413)


class TokenizeText(StrictModel):
    model: Text | None = None
    prompt: Text
    add_special_tokens: bool = True
    return_token_strs: bool | None = None


class TokenizeChat(ConversationBody):
    model: Text | None = None
    tools: list[FunctionTool] | None = None
    return_token_strs: bool | None = None


def _kind(body: Any) -> str:
    return "chat body" if isinstance(body, dict) and "messages" in body else "text body"


TokenizeRequest = Annotated[
    Annotated[TokenizeText, Tag("text body")] | Annotated[TokenizeChat, Tag("chat body")],
    Discriminator(_kind),
]


class DetokenizeRequest(StrictModel):
    model: Text | None = None
    tokens: TokenIds


def add_token_endpoints(app: FastAPI, server: Server) -> None:
    @app.post("/tokenize", responses=documented(*TOKEN_STATUSES))
    async def tokenize(
        body: Annotated[TokenizeRequest, Body()], request: Request
    ) -> dict[str, Any]:
        server.check_model(body.model)

        def taken() -> tuple[list[int], list[str] | None]:
            tokens = _tokens(server, body)
            named = server.tokenizer.convert_ids_to_tokens
            return tokens, named(tokens) if body.return_token_strs else None

        tokens, strings = await server.take_in(request, taken)
        return {
            "count": len(tokens),
            "max_model_len": server.loop.engine.max_length,
            "tokens": tokens,
            "token_strs": strings,
        }

    @app.post("/detokenize", responses=documented(*TOKEN_STATUSES))
    async def detokenize(body: DetokenizeRequest, request: Request) -> dict[str, str]:
        server.check_model(body.model)
        # Decoding keeps Python's lock: meanwhile no other request is served.
        most = max(server.loop.engine.max_length, MOST_DECODED)
        if len(body.tokens) > most:
            raise Refusal(
                400,
                f"tokens holds {len(body.tokens)} ids; at most {most} are decoded at a time, send "
                "them in parts",
                param="tokens",
            )
        size = server.loop.engine.target.vocab_size
        if (wrong := next((token for token in body.tokens if token >= size), None)) is not None:
            raise Refusal(
                400,
                f"tokens holds {wrong}; the ids of this model are 0..{size - 1}",
                param="tokens",
            )
        text = await server.take_in(request, lambda: server.tokenizer.decode(body.tokens))
        return {"prompt": text}

    @app.get("/tokenizer_info", responses=documented(200, 401))
    async def tokenizer_info() -> dict[str, Any]:
        tokenizer = server.vocabulary
        return {
            "tokenizer_class": type(tokenizer).__name__,
            "vocab_size": len(tokenizer),
            "model_max_length": server.loop.engine.max_length,
            "bos_token": tokenizer.bos_token,
            "eos_token": tokenizer.eos_token,
            "unk_token": tokenizer.unk_token,
            "pad_token": tokenizer.pad_token,
            "chat_template": tokenizer.chat_template,
        }


def _tokens(server: Server, body: TokenizeText | TokenizeChat) -> list[int]:
    if isinstance(body, TokenizeChat):
        return chat_prompt(server, body, [tool.plain() for tool in body.tools or ()]).tokens
    return encode(body.prompt, server.tokenizer, add_special_tokens=body.add_special_tokens)


SPECULATION_DOCUMENT = documented(200, 400, 401, 404, 503)
SPECULATION_DOCUMENT[404]["description"] = "No such answer is being made here."


class SpeculationChange(StrictModel):
    """Draft length of a running request from its next round on."""

    k: Annotated[int, Field(ge=0, le=MAX_K)]


def add_speculation_endpoints(app: FastAPI, server: Server) -> None:
    """State and change of the drafting of an answer that is being made."""

    # Not async, both: they wait for the end of a round, on a thread of the pool.
    @app.get("/v1/speculation/{answer}", responses=SPECULATION_DOCUMENT)
    def speculation(answer: str, request: Request) -> dict[str, Any]:
        return _drafting(server, answer, request)

    @app.post("/v1/speculation/{answer}", responses=SPECULATION_DOCUMENT)
    def change_speculation(
        answer: str, body: SpeculationChange, request: Request
    ) -> dict[str, Any]:
        return _drafting(server, answer, request, k=body.k)


def _drafting(
    server: Server, answer: str, request: Request, *, k: int | None = None
) -> dict[str, Any]:
    """State of the drafting of an answer, after its k is changed where one is given."""
    engine, tenant = server.loop.engine, server.tenant(request)

    def act() -> dict[str, Any]:
        requests = engine.scheduler.requests_of(answer, tenant)
        if k is not None:
            for each in requests:
                engine.check_k(each, k)
            for each in requests:
                engine.set_k(each, k)
        return drafting_state(answer, requests)

    state = server.loop.ask(act)
    if not state["choices"]:
        raise Refusal(
            404,
            f"no answer {answer!r} is being made here; it has ended, or belongs to another key or "
            "server",
            param="answer",
            code="not_running",
        )
    return state


FORGET_DOCUMENT: dict[int | str, dict[str, Any]] = {
    **documented(401, 404, 503),
    204: {"description": "Its records are deleted; nothing more of it will be learned from."},
}
FORGET_DOCUMENT[404]["description"] = "This answer has no record, or nothing is recorded here."
FORGET_DOCUMENT[503]["description"] = "The buffer cannot be reached; ask again."


def add_learning_endpoints(app: FastAPI, server: Server) -> None:
    # Not async: it takes seconds, in which a thread of the pool waits.
    @app.delete(
        "/v1/learn/{answer}",
        status_code=204,
        response_class=Response,
        responses=FORGET_DOCUMENT,
        operation_id="forget",
    )
    def forget(answer: str) -> Response:
        sink = server.loop.engine.recorder.sink
        if sink is None:
            raise Refusal(
                404,
                "nothing is recorded by this server; ask the one that answered",
                code="not_recorded",
            )
        try:
            num_records = sink.forget(answer)
        except OSError as error:
            raise Refusal(503, f"the buffer cannot be reached ({error}); ask again") from error
        if num_records == 0:
            message = (
                f"no record of {answer!r} is in the buffer; it is marked, so that servers write "
                "no more of it and a learner that still holds some drops them"
            )
            raise Refusal(404, message, param="answer", code="not_recorded")
        return Response(status_code=204)
