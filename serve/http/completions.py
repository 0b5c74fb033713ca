"""The HTTP face: OpenAI's endpoints over the engine's loop."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import AsyncIterator, Sequence
from typing import Any

from fastapi import Request, Response
from fastapi.responses import JSONResponse, StreamingResponse

from draftsmith.errors import UserError
from draftsmith.serve.http.errors import Refusal, as_refusal, failure, timed_out
from draftsmith.serve.http.exchange import Exchange
from draftsmith.serve.http.gate import tenant_of
from draftsmith.serve.http.protocol import Generation
from draftsmith.serve.http.responses import Extras, Responder
from draftsmith.serve.http.server import Server
from draftsmith.serve.http.tokens import Prompt, bad_word_tokens

LEARN_HEADER = "x-draftsmith-learn"  # "off" keeps a request's rounds out of the buffer


def _extras(server: Server, body: Generation) -> Extras:
    options = body.stream_options
    return Extras(
        report="detailed" if body.speculation.report else server.report,
        report_alone=body.speculation.report,
        token_ids=bool(body.return_token_ids),
        name_by_id=bool(body.return_tokens_as_token_ids),
        echo=body.echoes(),
        prompt_only=body.most_tokens() == 0,
        # A request without drafts has the target's distribution on any server.
        lossless=server.loop.engine.lossless or body.speculation.k == 0,
        usage=options is not None and bool(options.include_usage),
        running_usage=options is not None and bool(options.continuous_usage_stats),
    )


async def _answer(
    server: Server,
    request: Request,
    body: Generation,
    prompts: Sequence[Prompt],
    responder: Responder,
) -> Response:
    num_choices = body.n or 1
    _check_count(server, len(prompts), num_choices)
    exchange = Exchange(server.loop, server.aside, server.mailbox, server.limits.timeout_s)
    try:
        await _submit(server, exchange, request, body, prompts, answer=responder.id)
    except UserError as error:
        raise as_refusal(error, told_as=body.told_as) from error
    if body.stream:
        events = _stream(server, exchange, responder)
        return StreamingResponse(
            events, media_type="text/event-stream", headers={"cache-control": "no-cache"}
        )
    if not await _finished(server, request, exchange):
        return Response(status_code=499)
    for finished in exchange.requests:
        server.metrics.finished(finished, num_choices=num_choices)
        if (refusal := failure(finished)) is not None:
            raise refusal
    server.metrics.answered([finished.num_output for finished in exchange.requests], num_choices)
    return JSONResponse(responder.body(exchange.requests))


async def _submit(
    server: Server,
    exchange: Exchange,
    request: Request,
    body: Generation,
    prompts: Sequence[Prompt],
    *,
    answer: str,
) -> None:
    num_choices = body.n or 1
    bad_words = await server.aside.run(
        lambda: bad_word_tokens(body.bad_words or (), server.tokenizer)
    )
    params = [body.sampling(index, bad_words) for index in range(num_choices)]
    await exchange.submit(
        [prompt.tokens for prompt in prompts for _ in range(num_choices)],
        params * len(prompts),
        request_class=body.request_class,
        tenant=tenant_of(request.headers.get("authorization", ""))
        if len(server.limits.api_keys) > 1
        else "",
        learn=request.headers.get(LEARN_HEADER, "on").lower() not in ("off", "false", "0", "no"),
        answer=answer,
    )


def _check_count(server: Server, num_prompts: int, num_choices: int) -> None:
    """What the queue could not hold even when empty will not fit later either."""
    count, most = num_prompts * num_choices, server.loop.engine.config.max_queue
    if count > most:
        param = "prompt" if num_prompts > 1 else "n"
        message = (
            f"{num_prompts} prompts times n = {num_choices} are more than the {most} requests "
            "that this server's queue holds"
        )
        raise Refusal(400, f"{message}; ask for fewer at a time", param=param)


async def _finished(server: Server, request: Request, exchange: Exchange) -> bool:
    """Waits for the answer; False when the client went away first, which cancels it."""
    answer = asyncio.ensure_future(exchange.finished())
    gone = asyncio.ensure_future(_disconnected(request))
    try:
        await asyncio.wait({answer, gone}, return_when=asyncio.FIRST_COMPLETED)
        if answer.done() and isinstance(answer.exception(), asyncio.TimeoutError):
            raise timed_out(server.limits.timeout_s or 0.0)
        return answer.done()
    finally:
        for task in (answer, gone):
            task.cancel()
        exchange.cancel()


async def _disconnected(request: Request) -> None:
    while (await request.receive())["type"] != "http.disconnect":
        pass


async def _stream(server: Server, exchange: Exchange, responder: Responder) -> AsyncIterator[str]:
    try:
        async for body in _chunks(server, exchange, responder):
            yield _event(body)
    except asyncio.TimeoutError:
        yield _event(timed_out(server.limits.timeout_s or 0.0).body())
    except Refusal as refusal:
        # The status line is long gone, so the error comes as an event, as OpenAI and vLLM send it.
        yield _event(refusal.body())
    finally:
        exchange.cancel()
    yield "data: [DONE]\n\n"


async def _chunks(
    server: Server, exchange: Exchange, responder: Responder
) -> AsyncIterator[dict[str, Any]]:
    for index in range(len(exchange.requests)):
        if (opening := responder.opening(index)) is not None:
            yield opening
    previous_s: dict[int, float] = {}
    async for index, request, update in exchange.events():
        now_s = time.monotonic()
        if index in previous_s:
            server.metrics.updated(now_s - previous_s[index])
        previous_s[index] = now_s
        if update.finish_reason is not None:
            server.metrics.finished(request, num_choices=responder.num_choices)
            if (refusal := failure(request)) is not None:
                raise refusal
        # Also without text (half a character, say): a client measures the arrival of tokens by it.
        yield responder.update(index, request, update)
    server.metrics.answered(
        [request.num_output for request in exchange.requests], responder.num_choices
    )
    if (closing := responder.closing(exchange.requests)) is not None:
        yield closing


_encode = json.JSONEncoder(ensure_ascii=False, separators=(",", ":")).encode
# Line ends to Unicode but not to server-sent events. Many a client (all on httpx's iter_lines) cuts
# an event in two there.
LINE_ENDS = str.maketrans({end: f"\\u{ord(end):04x}" for end in "\x85\u2028\u2029"})


def _event(body: dict[str, Any]) -> str:
    return f"data: {_encode(body).translate(LINE_ENDS)}\n\n"
