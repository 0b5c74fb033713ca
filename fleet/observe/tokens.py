"""Tokens of a prompt and its answer: the server's own ids, else the target's tokenizer where it is
sure to give the same."""

from __future__ import annotations

from typing import NamedTuple

from draftsmith.chats.answers import ChatAnswers
from draftsmith.fleet.observe.answers import ObservedAnswer
from draftsmith.fleet.observe.endpoints import Body, Endpoint


class TokenCounter(NamedTuple):
    prompt: list[int]
    answer: list[int]


class Unknown(Exception):
    """Tokens that cannot be known; its text is the reason that is counted."""


def tokens_of(
    endpoint: Endpoint, request: Body, answer: ObservedAnswer, form: ChatAnswers | None
) -> TokenCounter:
    """Raises `Unknown` where neither the server nor the tokenizer gives the tokens."""
    prompt = answer.prompt_ids or endpoint.given_prompt(request)
    if prompt is None:
        prompt = _prompt(endpoint, request, answer, form)
    given = answer.token_ids
    if given is not None and answer.completion_tokens not in (None, len(given)):
        raise Unknown("token ids that are not all")
    return TokenCounter(prompt, _answer(prompt, request, answer, form) if given is None else given)


def _prompt(
    endpoint: Endpoint, request: Body, answer: ObservedAnswer, form: ChatAnswers | None
) -> list[int]:
    if form is None:
        raise Unknown("no token ids")
    try:
        prompt = endpoint.prompt(request, form.tokenizer)
    except Exception as error:
        # Chat templates are programs and may raise any exception.
        raise Unknown("prompts without a template") from error
    if prompt is None:
        raise Unknown("several prompts")
    if answer.prompt_tokens not in (None, len(prompt)):
        raise Unknown("prompts of another length")
    return prompt


def _answer(
    prompt: list[int], request: Body, answer: ObservedAnswer, form: ChatAnswers | None
) -> list[int]:
    """Tokens of the text. Any text has several tokenisations: the canonical one is taken where it
    gives back the text and has as many tokens as the server counted."""
    if form is None:
        raise Unknown("no token ids")
    if not answer.is_text_whole or request.get("echo"):
        raise Unknown("texts in parts")
    ids = form.exact(answer.text)
    if ids is None:
        raise Unknown("texts that do not round-trip")
    end = form.end_behind(prompt)
    # A stop string ends in the middle of a token, or of a text that is cut off.
    is_ended = answer.finish == "stop" and not isinstance(answer.stop_reason, str)
    if answer.completion_tokens is None:
        if is_ended and request.get("stop"):
            raise Unknown("stop strings without a count")
        return [*ids, *end] if is_ended else ids
    for found in (ids, [*ids, *end] if is_ended else ids):
        if len(found) == answer.completion_tokens:
            return found
    raise Unknown("texts of another length")
