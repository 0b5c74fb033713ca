"""OpenAI's completion endpoints over the engine's loop: submission of a request, its answer in one
piece or as a stream of server-sent events."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import AsyncIterator
from dataclasses import replace

from fastapi import FastAPI, Request, Response
from fastapi.responses import JSONResponse, StreamingResponse

from draftsmith.errors import UserError
from draftsmith.serve.http.chat import ChatPlan, ChatResponder, chat_plan
from draftsmith.serve.http.errors import Refusal, as_refusal, failure, unforeseen_failure
from draftsmith.serve.http.limits import arrival_of
from draftsmith.serve.http.protocol import ChatRequest, CompletionRequest, Generation
from draftsmith.serve.http.responses import CompletionResponder, Responder
from draftsmith.serve.http.schema import answers
from draftsmith.serve.http.server import Server
from draftsmith.serve.http.streams import RequestStreams
from draftsmith.serve.http.tokens import TokenPrompt, bad_word_tokens, completion_prompts
from draftsmith.serve.requests.request import RequestOptions

log = logging.getLogger(__name__)

LEARN_HEADER = "x-draftsmith-learn"  # "off" keeps a request's rounds out of the buffer


def add_completion_endpoints(app: FastAPI, server: Server) -> None:
    @app.post("/v1/completions", responses=answers())
    async def completions(body: CompletionRequest, request: Request) -> Response:
        model = server.check_model(body.model)
        _check_count(server, body.num_prompts(), body.n or 1)
        most = server.most_characters if body.truncate_prompt_tokens is None else None
        prompts = await server.take_in(
            request,
            lambda: completion_prompts(
                body.prompt,
                server.tokenizer,
                add_special_tokens=body.add_special_tokens,
                most_characters=most,
            ),
        )
        responder = CompletionResponder(model, server.vocabulary, body, prompts, server.report)
        return await answer(server, request, responder)

    @app.post("/v1/chat/completions", responses=answers())
    async def chat(body: ChatRequest, request: Request) -> Response:
        model = server.check_model(body.model)
        plan = await planned(server, request, body)
        responder = ChatResponder(
            model, server.vocabulary, body, [plan.prompt], server.report, form=plan.form
        )
        return await answer(server, request, responder, plan)


async def planned(server: Server, request: Request, body: ChatRequest) -> ChatPlan:
    try:
        return await server.take_in(request, lambda: chat_plan(server, body))
    except UserError as error:
        raise as_refusal(error, api_name=body.api_name) from error


async def answer(
    server: Server, request: Request, responder: Responder, plan: ChatPlan | None = None
) -> Response:
    """Answer to a request, in one piece or as a stream."""
    body, num_choices = responder.asked, responder.num_choices
    responder.prompts = [_shortened(server, body, prompt) for prompt in responder.prompts]
    _check_count(server, len(responder.prompts), num_choices)
    streams = RequestStreams(
        server.loop,
        server.intake,
        server.bridge,
        arrival_of(request),
        every_round=bool(body.stream),
    )
    try:
        await _submit(server, streams, request, responder, plan)
    except UserError as error:
        raise as_refusal(error, api_name=body.api_name) from error
    if body.stream:
        events = _stream(server, streams, responder)
        return StreamingResponse(
            events, media_type="text/event-stream", headers={"cache-control": "no-cache"}
        )
    if not await _finished(request, streams):
        return Response(status_code=499)
    for finished in streams.requests:
        server.metrics.finished(finished, num_choices=num_choices)
        if (refusal := failure(finished)) is not None:
            raise refusal
    server.metrics.answered([finished.num_output for finished in streams.requests], num_choices)
    return JSONResponse(responder.body(streams.requests))


async def _submit(
    server: Server,
    streams: RequestStreams,
    request: Request,
    responder: Responder,
    plan: ChatPlan | None,
) -> None:
    body, prompts = responder.asked, responder.prompts
    params = await server.take_in(
        request, lambda: body.sampling(bad_word_tokens(body.bad_words or (), server.tokenizer))
    )
    if plan is not None:
        params = [replace(one, grammar=plan.grammar) for one in params]
    longest = server.loop.engine.max_length
    await streams.submit(
        [prompt.tokens for prompt in prompts for _ in params],
        [body.within(one, longest - len(prompt.tokens)) for prompt in prompts for one in params],
        RequestOptions(
            request_class=body.request_class,
            tenant=server.tenant(request),
            learn=request.headers.get(LEARN_HEADER, "on").lower()
            not in ("off", "false", "0", "no"),
            adapter=server.adapter_of(body.model),
            priority=body.priority,
            cache_salt=body.cache_salt or "",
            shown_tokens=frozenset() if plan is None else plan.shown,
            prompt_alone=body.most_tokens() == 0,
            answer=responder.id,
        ),
    )


def _shortened(server: Server, body: Generation, prompt: TokenPrompt) -> TokenPrompt:
    """The prompt, or its last tokens where the request asks for no more."""
    most = body.truncate_prompt_tokens
    if most == -1:
        most = server.loop.engine.max_length - max(body.most_tokens() or 1, 1)
    if most is None or most < 1 or len(prompt.tokens) <= most:
        return prompt
    return TokenPrompt(prompt.tokens[-most:], None)


def _check_count(server: Server, num_prompts: int, num_choices: int) -> None:
    """Refuse more requests than the queue holds when empty: they will not fit later either."""
    count, most = num_prompts * num_choices, server.loop.engine.config.max_queue
    if count > most:
        param = "prompt" if num_prompts > 1 else "n"
        message = (
            f"{num_prompts} prompts times n = {num_choices} are more than the {most} requests "
            "that this server's queue holds"
        )
        raise Refusal(400, f"{message}; ask for fewer at a time", param=param)


async def _finished(request: Request, streams: RequestStreams) -> bool:
    """Waits for the answer; False when the client went away first, which cancels it."""
    answer = asyncio.ensure_future(streams.finished())
    gone = asyncio.ensure_future(_disconnected(request))
    try:
        await asyncio.wait({answer, gone}, return_when=asyncio.FIRST_COMPLETED)
        return answer.done() and bool(answer.result())
    finally:
        for task in (answer, gone):
            task.cancel()
        streams.cancel()


async def _disconnected(request: Request) -> None:
    while (await request.receive())["type"] != "http.disconnect":
        pass


async def _stream(
    server: Server, streams: RequestStreams, responder: Responder
) -> AsyncIterator[bytes]:
    """Server-sent events of an answer. Those of updates that came together are one part."""
    metrics, num_choices = server.metrics, responder.num_choices
    updated_s: dict[int, float] = {}
    try:
        if openings := responder.openings(len(streams.requests)):
            yield "".join(map(responder.frame, openings)).encode()
        async for events in streams.rounds():
            now_s = time.monotonic()
            frames: list[str] = []
            for index, request, update in events:
                if index in updated_s:
                    metrics.updated(now_s - updated_s[index])
                updated_s[index] = now_s
                if update.finish_reason is not None:
                    metrics.finished(request, num_choices=num_choices)
                    if (refusal := failure(request)) is not None:
                        yield "".join(frames).encode()
                        raise refusal
                # Also without text (half a character, say): a client measures the arrival of
                # tokens by it.
                frames.append(responder.frames(index, request, update))
            yield "".join(frames).encode()
        metrics.answered([request.num_output for request in streams.requests], num_choices)
        if closings := responder.closings(streams.requests):
            yield "".join(map(responder.frame, closings)).encode()
    except Refusal as late:
        # The status line is long gone, so the error comes as an event, as OpenAI and vLLM send it.
        yield responder.frame(responder.failed(late.body())).encode()
    except Exception:
        # Here too: a stream that only ends looks whole.
        log.exception("an answer's stream could not be built")
        yield responder.frame(responder.failed(unforeseen_failure().body())).encode()
    finally:
        streams.cancel()
    yield responder.last_frame.encode()
