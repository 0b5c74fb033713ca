"""`/v1/responses`. Nothing is stored."""

from __future__ import annotations

from fastapi import FastAPI, Request, Response

from draftsmith.errors import UserError
from draftsmith.serve.http.chat import chat_plan
from draftsmith.serve.http.completions import answer, response_options
from draftsmith.serve.http.errors import as_refusal
from draftsmith.serve.http.schema import ANSWER_STATUSES, documented, events_of
from draftsmith.serve.http.server import Server
from draftsmith.serve.http.tokens import TokenPrompt
from draftsmith.serve.responses.conversation import NAMES, chat_request
from draftsmith.serve.responses.protocol import ResponsesRequest
from draftsmith.serve.responses.responder import ResponsesResponder
from draftsmith.serve.responses.schema import ResponseBody


def add_responses_endpoint(app: FastAPI, server: Server) -> None:
    @app.post(
        "/v1/responses", responses={**events_of(ResponseBody), **documented(*ANSWER_STATUSES)}
    )
    async def responses(body: ResponsesRequest, request: Request) -> Response:
        model = server.check_model(body.model)
        chat = chat_request(body)

        def api_name(name: str) -> str:
            name = chat.api_name(name)
            return NAMES.get(name, name)

        try:
            plan = await server.take_in(request, lambda: chat_plan(server, chat))
        except UserError as error:
            raise as_refusal(error, api_name=api_name) from error
        prompt = TokenPrompt(plan.tokens, None)
        responder = ResponsesResponder(
            model,
            server.vocabulary,
            response_options(server, chat),
            [prompt],
            prefix="resp",
            asked=body,
            form=plan.form,
        )
        return await answer(server, request, chat, [prompt], responder, plan, api_name=api_name)
