"""Endpoints for trainers and learners whose target runs here: what it is, its weights, and its
states of their texts. A pass over texts runs between two rounds of the engine."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from fastapi import FastAPI, Request, Response

from draftsmith.drafters.remote.messages import (
    BODY_TYPE,
    REVISION_HEADER,
    STATES_PATH,
    TARGET_PATH,
    WEIGHTS_PATH,
    Texts,
    body_of_states,
    body_of_weights,
    texts_of_body,
)
from draftsmith.drafters.remote.service import (
    check_layer,
    check_texts,
    described,
    states,
    weights_of,
)
from draftsmith.drafters.target.target import Target
from draftsmith.serve.http.errors import Refusal, overloaded
from draftsmith.serve.http.schema import documented
from draftsmith.serve.http.server import Server
from draftsmith.serve.rank_calls import Ranks, Weights

# A pass may wait for a round of long prompts; longer, and the engine is stuck.
WAIT_S = 600.0
# At a time, each with its body in memory: two of each of many training processes.
MOST_REQUESTS = 32
BINARY = {"content": {BODY_TYPE: {"schema": {"type": "string", "format": "binary"}}}}
DOCUMENT: dict[int | str, dict[str, Any]] = {
    **documented(400, 401, 413, 429, 503),
    200: {"description": "Tensors (safetensors).", **BINARY},
}


class TargetPasses:
    """Work on the engine's thread, one piece at a time: between two of them a round is run."""

    def __init__(self, server: Server):
        self.server = server
        self._turn = threading.Lock()
        # Of their own: the other endpoints' threads do not wait for the engine. States of one
        # request are packed during the pass of the next, weights are in memory once.
        self._for_states = ThreadPoolExecutor(2, thread_name_prefix="draftsmith-states")
        self._for_weights = ThreadPoolExecutor(1, thread_name_prefix="draftsmith-weights")
        self._num_requests = 0

    def run(self, act: Callable[[], Any]) -> Any:
        with self._turn:
            return self.server.loop.ask(act, timeout_s=WAIT_S)

    async def weights(self, layer: int | None = None) -> bytes:
        with self._counted():
            return await on_thread(self._for_weights, partial(self.weights_body, layer))

    async def states(self, request: Request) -> bytes:
        with self._counted():
            body = await request.body()
            return await on_thread(self._for_states, partial(self.states_body, body))

    @contextmanager
    def _counted(self) -> Iterator[None]:
        """Around a request. Raises `Refusal` where too many wait; a client asks again."""
        if self._num_requests >= MOST_REQUESTS:
            raise overloaded(
                f"{self._num_requests} requests for states or weights of the target wait; try "
                "again later"
            )
        self._num_requests += 1
        try:
            yield
        finally:
            self._num_requests -= 1

    def weights_body(self, layer: int | None = None) -> bytes:
        target = self.server.loop.engine.target
        if layer is not None:
            check_layer(target, layer)
        return body_of_weights(self.run(partial(whole_weights, target, layer)))

    def states_body(self, body: bytes) -> bytes:
        """Answer to a request's body."""
        texts, target = texts_of_body(body), self.server.loop.engine.target
        check_texts(target, texts, self.server.states_max_tokens)
        if texts.top and isinstance(target, Ranks):
            raise Refusal(
                400,
                "top is given, and likeliest tokens are not searched by the processes of "
                "--tensor-parallel; leave target_logprobs out",
            )
        try:
            return body_of_states(self.run(partial(states, target, texts)))
        except torch.OutOfMemoryError as error:
            raise no_memory(texts) from error


async def on_thread(threads: ThreadPoolExecutor, work: Callable[[], bytes]) -> bytes:
    return await asyncio.get_running_loop().run_in_executor(threads, work)


def whole_weights(target: Target, layer: int | None) -> dict[str, torch.Tensor]:
    if not isinstance(target, Ranks):
        return weights_of(target, layer)
    with target.together(Weights(-1 if layer is None else layer)):
        return weights_of(target, layer)


def no_memory(texts: Texts) -> Refusal:
    return Refusal(
        413,
        f"the device has no memory for a pass over {texts.num_positions} positions; send smaller "
        "batches, or give this server less --memory-gib",
        code="body_too_large",
    )


def add_target_endpoints(app: FastAPI, server: Server) -> None:
    passes, target = TargetPasses(server), server.loop.engine.target

    def tensors(body: bytes) -> Response:
        headers = {REVISION_HEADER: target.revision}
        return Response(body, media_type=BODY_TYPE, headers=headers)

    @app.get(TARGET_PATH, responses={**documented(401)})
    def description() -> dict[str, Any]:
        most = server.states_max_tokens
        return described(target, max_tokens=most, tokenizer=server.vocabulary)

    @app.get(WEIGHTS_PATH, response_class=Response, responses=DOCUMENT)
    async def weights() -> Response:
        return tensors(await passes.weights())

    @app.get(WEIGHTS_PATH + "/{layer}", response_class=Response, responses=DOCUMENT)
    async def weights_of_layer(layer: int) -> Response:
        return tensors(await passes.weights(layer))

    @app.post(
        STATES_PATH,
        response_class=Response,
        responses=DOCUMENT,
        openapi_extra={"requestBody": {"required": True, **BINARY}},
    )
    async def states_of_texts(request: Request) -> Response:
        return tensors(await passes.states(request))
