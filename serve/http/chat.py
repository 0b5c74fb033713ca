"""A chat request as a prompt, the grammar of its answers and the way they are read."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from draftsmith.errors import UserError
from draftsmith.serve.bodies.messages import Conversation
from draftsmith.serve.http.protocol import ChatRequest
from draftsmith.serve.http.server import Server
from draftsmith.serve.http.tokens import Templated, templated
from draftsmith.serve.sampling.grammar import Grammar
from draftsmith.serve.tools.answer import AnswerForm
from draftsmith.serve.tools.grammars import after_reasoning, call_grammar
from draftsmith.serve.tools.reasoning import Thinking, thinking_after

DEVELOPER, SYSTEM = "developer", "system"


@dataclass(frozen=True)
class ChatPlan:
    tokens: list[int]  # of the prompt
    grammar: Grammar | None  # of the whole text of an answer
    form: AnswerForm
    shown: frozenset[int]  # special tokens that the text of an answer keeps


def chat_plan(server: Server, body: ChatRequest) -> ChatPlan:
    """Runs on the tokenizer's thread."""
    choice, template = body.choice(), server.template
    calls = template.check_tools() if choice.tools else None
    prompt = chat_prompt(
        server, body, [tool.plain() for tool in body.offered()], _variables(server, body)
    )
    reasoning, thinking = template.reasoning, Thinking.DONE
    if reasoning is not None:
        thinking = thinking_after(prompt.text, reasoning)
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
        prompt.tokens,
        grammar,
        AnswerForm(calls, [tool.name for tool in choice.tools], certain, reasoning, thinking),
        template.shown(*markers, *(reasoning or ())),
    )


def chat_prompt(
    server: Server,
    body: Conversation,
    tools: Sequence[dict[str, Any]] = (),
    variables: dict[str, Any] | None = None,
) -> Templated:
    """Prompt of a conversation; `tools` as chat templates take them."""
    prompts_answer = not body.continue_final_message
    messages = [message.plain() for message in body.messages]
    if DEVELOPER not in server.template.source:
        # A template without OpenAI's newer name of the role.
        for message in messages:
            message["role"] = SYSTEM if message["role"] == DEVELOPER else message["role"]
    return templated(
        messages,
        server.tokenizer,
        tools=tools,
        add_generation_prompt=prompts_answer
        if body.add_generation_prompt is None
        else body.add_generation_prompt,
        continue_final_message=body.continue_final_message,
        add_special_tokens=body.add_special_tokens,
        variables=body.chat_template_kwargs if variables is None else variables,
    )


def _variables(server: Server, body: ChatRequest) -> dict[str, Any]:
    """Variables of the template: those given as such, and fields that it takes."""
    variables = dict(body.chat_template_kwargs or {})
    effort, template = body.reasoning_effort, server.template
    if effort is not None:
        if template.takes("reasoning_effort"):
            variables.setdefault("reasoning_effort", effort)
        elif effort == "none" and template.takes("enable_thinking"):
            variables.setdefault("enable_thinking", False)
        else:
            raise UserError(
                f"reasoning_effort is {effort!r}, which this model's chat template does not take; "
                "leave it out or set its variables by chat_template_kwargs"
            )
    if body.verbosity not in (None, "medium"):
        if not template.takes("verbosity"):
            raise UserError(
                f"verbosity is {body.verbosity!r}, which this model's chat template does not take; "
                "leave it out"
            )
        variables.setdefault("verbosity", body.verbosity)
    return variables
