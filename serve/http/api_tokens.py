"""The target's tokenizer over HTTP, as vLLM offers it: tokenize, detokenize, tokenizer_info."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Any

from fastapi import FastAPI
from pydantic import Discriminator, Tag

from draftsmith.serve.http.api_wire import Text, Wire
from draftsmith.serve.http.errors import Refusal
from draftsmith.serve.http.protocol import Conversation, TokenIds
from draftsmith.serve.http.schema import DetokenizeBody, TokenizeBody, TokenizerInfo, documented
from draftsmith.serve.http.tokens import encode

if TYPE_CHECKING:
    from draftsmith.serve.http.completions import Server

STATUSES = (400, 401, 404, 413)


class TokenizeText(Wire):
    model: Text | None = None
    prompt: Text
    add_special_tokens: bool = True
    return_token_strs: bool | None = None


class TokenizeChat(Conversation):
    model: Text | None = None
    return_token_strs: bool | None = None


def _kind(body: Any) -> str:
    return "chat body" if isinstance(body, dict) and "messages" in body else "text body"


TokenizeRequest = Annotated[
    Annotated[TokenizeText, Tag("text body")] | Annotated[TokenizeChat, Tag("chat body")], Discriminator(_kind)
]


class DetokenizeRequest(Wire):
    model: Text | None = None
    tokens: TokenIds


def add_token_endpoints(app: FastAPI, server: Server) -> None:
    @app.post("/tokenize", responses={**documented(200, model=TokenizeBody), **documented(*STATUSES)})
    async def tokenize(body: TokenizeRequest) -> dict[str, Any]:
        server.check_model(body.model)
        tokens = await server.aside.run(lambda: _tokens(server, body))
        strings = server.vocabulary.convert_ids_to_tokens(tokens) if body.return_token_strs else None
        return {
            "count": len(tokens),
            "max_model_len": server.loop.engine.max_length,
            "tokens": tokens,
            "token_strs": strings,
        }

    @app.post("/detokenize", responses={**documented(200, model=DetokenizeBody), **documented(*STATUSES)})
    async def detokenize(body: DetokenizeRequest) -> dict[str, str]:
        server.check_model(body.model)
        size = server.loop.engine.target.vocab_size
        if (wrong := next((token for token in body.tokens if token >= size), None)) is not None:
            raise Refusal(400, f"tokens holds {wrong}; the ids of this model are 0..{size - 1}", param="tokens")
        return {"prompt": server.vocabulary.decode(body.tokens)}

    @app.get("/tokenizer_info", responses={**documented(200, model=TokenizerInfo), **documented(401)})
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
        return server.chat_prompt(body)
    return encode(body.prompt, server.tokenizer, add_special_tokens=body.add_special_tokens)
