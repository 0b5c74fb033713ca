"""Tokens of a chat that holds its answers, and the exact mask of those that the target would have
written.

A template with `{% generation %}` marks them itself. Any other is rendered up to each answer, as a
server would, and through it: where these renderings begin each other, the answer lies between them.
It ends with the end-of-text token that closes it, or with its content where the template has none;
whatever the template puts behind that is not masked.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any, NamedTuple, Protocol

from jinja2 import TemplateError

from draftsmith.errors import UserError

Messages = Sequence[dict[str, Any]]
GENERATION = re.compile(r"\{%-?\s*generation\s*-?%\}")


class ChatTokenizer(Protocol):
    """Part of a transformers tokenizer that chats need."""

    def get_chat_template(self) -> str: ...

    def apply_chat_template(self, conversation: Any, **options: Any) -> Any: ...

    def encode(self, text: str, *, add_special_tokens: bool = True) -> list[int]: ...

    def convert_ids_to_tokens(self, ids: list[int]) -> list[str]: ...


class Masked(NamedTuple):
    ids: list[int]
    mask: list[int]  # 1 = the target would have written this token


def masked_chat(
    messages: Messages, tokenizer: ChatTokenizer, eos_token_ids: Sequence[int], *, where: str
) -> Masked:
    """Tokens and mask. `where` names the chat in the error when it cannot be masked."""
    if not any(turn["role"] == "assistant" for turn in messages):
        raise UserError(
            f"{where} has no assistant turn; leave out --keep-answers to have the target answer it"
        )
    try:
        if GENERATION.search(tokenizer.get_chat_template()):
            found = _by_template(messages, tokenizer)
        else:
            found = _by_prefixes(messages, tokenizer, eos_token_ids, where)
    except TemplateError as error:
        raise UserError(
            f"{where} cannot be rendered by the target's chat template ({error}); mend the chat"
        ) from error
    if not any(found.mask):
        raise UserError(
            f"{where} has an empty mask: the chat template leaves its answers out; mend the chat "
            "or the template"
        )
    return found


def _by_template(messages: Messages, tokenizer: ChatTokenizer) -> Masked:
    rendered = tokenizer.apply_chat_template(
        messages, tokenize=True, return_dict=True, return_assistant_tokens_mask=True
    )
    return Masked(list(rendered["input_ids"]), list(rendered["assistant_masks"]))


def _by_prefixes(
    messages: Messages, tokenizer: ChatTokenizer, eos_token_ids: Sequence[int], where: str
) -> Masked:
    whole = _rendered(messages, tokenizer)
    ids = tokenizer.encode(whole, add_special_tokens=False)
    if ids != list(tokenizer.apply_chat_template(messages, tokenize=True, return_dict=False)):
        raise UserError(
            f"{where} is tokenised otherwise as text than as a chat; use a template with a "
            "generation block"
        )
    ends = tokenizer.convert_ids_to_tokens(list(eos_token_ids))
    mask = [0] * len(ids)
    for at, turn in enumerate(messages):
        if turn["role"] != "assistant":
            continue
        before = _rendered(messages[:at], tokenizer, add_generation_prompt=True)
        through = _rendered(messages[: at + 1], tokenizer)
        if not (through.startswith(before) and whole.startswith(through)):
            raise UserError(
                f"{where}: the chat template renders turn {at + 1} otherwise once more follows, "
                "so its answer has no exact mask; "
                "give chats that end with the answer to train on, or a template with a generation "
                "block"
            )
        end = len(before) + _answer_size(through[len(before) :], turn.get("content"), ends)
        begin_token, end_token = (
            _tokens_of(ids, before, tokenizer),
            _same_tokens(ids, whole[:end], tokenizer),
        )
        mask[begin_token:end_token] = [1] * max(0, end_token - begin_token)
    return Masked(ids, mask)


def _rendered(messages: Messages, tokenizer: ChatTokenizer, **options: Any) -> str:
    return tokenizer.apply_chat_template(list(messages), tokenize=False, **options)


def _answer_size(span: str, content: Any, ends: Sequence[str]) -> int:
    """Length of the part of a rendered answer that the target writes: its content and the end of
    text behind it."""
    size = 0
    if isinstance(content, str) and (at := span.find(content.strip())) >= 0:
        size = at + len(content.strip())
    closing = [(span.find(end, size), end) for end in ends if end in span[size:]]
    if closing:
        at, end = min(closing)
        # Behind the content, nothing but space may stand before the token that ends it.
        if size == 0 or not span[size:at].strip():
            return at + len(end)
    return size or len(span.rstrip())


def _same_tokens(ids: list[int], prefix: str, tokenizer: ChatTokenizer) -> int:
    """Number of tokens of the whole text that are those of `prefix` alone."""
    alone = tokenizer.encode(prefix, add_special_tokens=False)
    return next(
        (at for at, (one, other) in enumerate(zip(ids, alone)) if one != other),
        min(len(ids), len(alone)),
    )


def _tokens_of(ids: list[int], prefix: str, tokenizer: ChatTokenizer) -> int:
    """Index at which the text behind `prefix` begins. A token on both sides of that edge cannot
    have been written by the target."""
    same = _same_tokens(ids, prefix, tokenizer)
    return same if same == len(tokenizer.encode(prefix, add_special_tokens=False)) else same + 1
