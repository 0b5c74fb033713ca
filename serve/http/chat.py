"""Chat: a request as a prompt, the grammar of its answers and the way they are read; its response
bodies."""

from __future__ import annotations

import uuid
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from draftsmith.chats import request_variables
from draftsmith.serve.http.bodies import ConversationBody
from draftsmith.serve.http.protocol import ChatRequest
from draftsmith.serve.http.responses import Body, ChoicesResponder, finish_name, finite
from draftsmith.serve.http.server import Server
from draftsmith.serve.http.tokens import TokenPrompt, conversation_prompt
from draftsmith.serve.requests.request import FinishReason, Request, TokenLogprob, Update
from draftsmith.serve.sampling.grammar import Grammar
from draftsmith.serve.tools.answer import AnswerForm, AnswerParser, Thinking, joined, thinking_after
from draftsmith.serve.tools.call_format import AnswerPiece, CallPiece
from draftsmith.serve.tools.template import after_reasoning, call_grammar


@dataclass(frozen=True)
class ChatPlan:
    prompt: TokenPrompt
    grammar: Grammar | None  # of the whole text of an answer
    form: AnswerForm
    shown: frozenset[int]  # special tokens that the text of an answer keeps


def chat_plan(server: Server, body: ChatRequest) -> ChatPlan:
    """Runs on the tokenizer's thread."""
    choice, template = body.choice(), server.template
    calls = template.check_tools() if choice.tools else None
    prompt = chat_prompt(
        server,
        body,
        [tool.plain() for tool in body.offered()],
        request_variables(dict(body), template.source),
        server.most_characters if body.truncate_prompt_tokens is None else None,
    )
    reasoning, thinking = template.reasoning, Thinking.DONE
    if reasoning is not None:
        continued = body.messages[-1].plain()["content"] if body.continue_final_message else ""
        thinking = thinking_after(prompt.text or "", reasoning, continued)
    grammar = body.answer_grammar()
    certain = False
    if calls is not None:
        grammar = call_grammar(
            calls,
            choice.tools,
            template.marks,
            forced=choice.forced,
            parallel=choice.parallel,
            answer=grammar,
        )
        certain = grammar is not None
    if grammar is not None and reasoning is not None:
        grammar = after_reasoning(grammar, reasoning, template.marks, thinking)
    markers = () if calls is None else calls.markers
    return ChatPlan(
        prompt,
        grammar,
        AnswerForm(
            calls,
            [tool.name for tool in choice.tools],
            certain,
            reasoning,
            thinking,
            body.continue_final_message,
        ),
        template.shown(*markers, *(reasoning or ())),
    )


def chat_prompt(
    server: Server,
    body: ConversationBody,
    tools: Sequence[dict[str, Any]] = (),
    variables: dict[str, Any] | None = None,
    most_characters: int | None = None,
) -> TokenPrompt:
    """Prompt of a conversation; `tools` as chat templates take them."""
    return conversation_prompt(
        [message.plain() for message in body.messages],
        server.tokenizer,
        tools=tools,
        variables=body.chat_template_kwargs if variables is None else variables,
        add_generation_prompt=body.add_generation_prompt,
        continue_final_message=body.continue_final_message,
        add_special_tokens=body.add_special_tokens,
        most_characters=most_characters,
    )


@dataclass
class ChatResponder(ChoicesResponder):
    prefix = "chatcmpl-"
    whole, piece = "chat.completion", "chat.completion.chunk"
    asked: ChatRequest
    form: AnswerForm = field(default_factory=AnswerForm)
    parsers: dict[int, AnswerParser] = field(default_factory=dict)  # of streamed choices
    call_ids: dict[tuple[int, int], str] = field(default_factory=dict)  # by choice and call

    def body(self, requests: Sequence[Request]) -> Body:
        return super().body(requests) | self._prompt_tokens() | self.prompt_logprobs(requests[0])

    def choice(self, index: int, request: Request) -> Body:
        parser = self.form.parser()
        piece = joined([parser.push(request.text), parser.finish()])
        content = None if piece.calls and not piece.content else piece.content
        message: Body = {"role": "assistant", "content": content} | self._reasoning(piece)
        if piece.calls:
            message["tool_calls"] = [self._call(index, call) for call in piece.calls]
        logprobs = self._logprobs(request, request.logprobs)
        reason = self._finish_name(request.finish_reason, parser)
        return _chat_choice(index, "message", message, logprobs, reason)

    def openings(self, num_requests: int) -> list[Body]:
        delta = {"role": "assistant", "content": ""}
        chunks = [
            self.chunk([_chat_choice(index, "delta", delta)]) for index in range(num_requests)
        ]
        chunks[0] |= self._prompt_tokens()
        return chunks

    def frames(self, index: int, request: Request, update: Update) -> str:
        if self.form.is_text and update.text and self.brings_text(request, update):
            return self.text_frame(index, update.text, _content_choice)
        return super().frames(index, request, update)

    def delta(self, index: int, request: Request, update: Update) -> Body:
        parser = self.parsers.get(index)
        if parser is None:
            parser = self.parsers[index] = self.form.parser()
        piece = parser.push(update.text)
        if update.finish_reason is not None:
            piece = joined([piece, parser.finish()])
        delta: Body = self._reasoning(piece)
        if piece.content:
            delta["content"] = piece.content
        if piece.calls:
            delta["tool_calls"] = [self._call_delta(index, call) for call in piece.calls]
        logprobs = self._logprobs(request, update.logprobs)
        reason = self._finish_name(update.finish_reason, parser)
        return _chat_choice(index, "delta", delta, logprobs, reason)

    def _call(self, index: int, call: CallPiece) -> Body:
        return {
            "id": self.call_ids.setdefault((index, call.index), new_call_id()),
            "type": "function",
            "function": {"name": call.name, "arguments": call.arguments},
        }

    def _call_delta(self, index: int, call: CallPiece) -> Body:
        if call.name is None:
            return {"index": call.index, "function": {"arguments": call.arguments}}
        return {"index": call.index} | self._call(index, call)

    def _reasoning(self, piece: AnswerPiece) -> Body:
        shown = piece.reasoning and self.asked.include_reasoning is not False
        return {"reasoning_content": piece.reasoning} if shown else {}

    def _finish_name(self, reason: FinishReason | None, parser: AnswerParser) -> str | None:
        if reason is FinishReason.STOP and parser.num_calls:
            return "tool_calls"
        return finish_name(reason)

    def _prompt_tokens(self) -> Body:
        return {"prompt_token_ids": self.prompts[0].tokens} if self.asked.return_token_ids else {}

    def _logprobs(self, request: Request, entries: list[TokenLogprob]) -> Body | None:
        if request.params.logprobs is None:
            return None
        content = [
            self._entry(entry.token, entry.logprob)
            | {"top_logprobs": [self._entry(*pair) for pair in entry.top]}
            for entry in entries
        ]
        return {"content": content}

    def _entry(self, token: int, logprob: float) -> Body:
        return {
            "token": self.token(token),
            "logprob": finite(logprob),
            "bytes": self.texts.bytes(token),
        }


def _chat_choice(
    index: int, kind: str, told: Body, logprobs: Body | None = None, reason: str | None = None
) -> Body:
    """A choice with its message or, of a chunk, its delta."""
    return {"index": index, kind: told, "logprobs": logprobs, "finish_reason": reason}


def _content_choice(index: int, text: str) -> Body:
    return _chat_choice(index, "delta", {"content": text})


def new_call_id() -> str:
    # Nine letters or digits are what templates of Mistral ask for.
    return uuid.uuid4().hex[:9]
