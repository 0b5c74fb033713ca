"""Texts of API requests as token ids, and single tokens as texts and bytes."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any, NamedTuple, Protocol

from transformers import PreTrainedTokenizerBase
from transformers.convert_slow_tokenizer import bytes_to_unicode

from draftsmith.errors import UserError
from draftsmith.text_stream import BROKEN


class Prompt(NamedTuple):
    tokens: list[int]
    text: str | None  # as the client sent it; None where it sent tokens


class Templated(NamedTuple):
    tokens: list[int]
    text: str


def completion_prompts(
    prompt: str | list[str] | list[int] | list[list[int]],
    tokenizer: PreTrainedTokenizerBase,
    *,
    add_special_tokens: bool = True,
) -> list[Prompt]:
    """Prompts of one request, given as one or several, as text or as ids."""
    if isinstance(prompt, str):
        return [Prompt(encode(prompt, tokenizer, add_special_tokens=add_special_tokens), prompt)]
    if not prompt:
        raise UserError("prompt is an empty list; give a text or token ids")
    if isinstance(prompt[0], int):
        return [Prompt(list(prompt), None)]
    return [
        Prompt(encode(item, tokenizer, add_special_tokens=add_special_tokens), item)
        if isinstance(item, str)
        else Prompt(list(item), None)
        for item in prompt
    ]


def encode(text: str, tokenizer: PreTrainedTokenizerBase, *, add_special_tokens: bool) -> list[int]:
    return list(tokenizer(text, add_special_tokens=add_special_tokens)["input_ids"])


def templated(
    messages: list[dict[str, Any]],
    tokenizer: PreTrainedTokenizerBase,
    *,
    tools: Sequence[dict[str, Any]] = (),
    add_generation_prompt: bool = True,
    continue_final_message: bool = False,
    add_special_tokens: bool = False,
    variables: dict[str, Any] | None = None,
) -> Templated:
    """A conversation as a prompt; `variables` are the chat template's own."""
    if tokenizer.chat_template is None:
        raise UserError(
            "messages need a chat template, which this model's tokenizer has not; use "
            "/v1/completions"
        )
    try:
        text = tokenizer.apply_chat_template(
            messages,
            tools=list(tools) or None,
            tokenize=False,
            add_generation_prompt=add_generation_prompt,
            continue_final_message=continue_final_message,
            **(variables or {}),
        )
    except Exception as error:
        # Templates are programs and may raise any exception, mostly about the order of roles.
        reason = re.sub(r"\s+", " ", str(error))
        raise UserError(
            f"messages are refused by the chat template ({reason}); mend them"
        ) from error
    return Templated(encode(text, tokenizer, add_special_tokens=add_special_tokens), text)


def bad_word_tokens(
    words: Sequence[str], tokenizer: PreTrainedTokenizerBase
) -> tuple[tuple[int, ...], ...]:
    """The tokens of each word at the beginning of a text and, as vLLM has it, of those after a
    space where that is another first token and as many of them."""
    sequences: list[tuple[int, ...]] = []
    for word in words:
        first, spaced = (
            tuple(encode(space + word.lstrip(), tokenizer, add_special_tokens=False))
            for space in ("", " ")
        )
        if not first:
            raise UserError(f"bad_words holds {word!r}, which has no tokens; leave it out")
        sequences.append(first)
        if len(spaced) == len(first) and spaced[0] != first[0]:
            sequences.append(spaced)
    return tuple(sequences)


class Vocabulary(Protocol):
    """The part of transformers' tokenizers that names tokens."""

    def decode(
        self,
        token_ids: Sequence[int],
        *,
        skip_special_tokens: bool = False,
        clean_up_tokenization_spaces: bool | None = None,
    ) -> str: ...

    def convert_ids_to_tokens(self, ids: Sequence[int]) -> Sequence[str | bytes]: ...


BYTES = {letter: number for number, letter in bytes_to_unicode().items()}
BYTE = re.compile(r"<0x([0-9A-Fa-f]{2})>")


class TokenTexts:
    """Texts and bytes of single tokens, as they are within a text."""

    def __init__(self, vocabulary: Vocabulary):
        self.vocabulary = vocabulary
        self._texts: dict[int, str] = {}

    def text(self, token: int) -> str:
        text = self._texts.get(token)
        if text is None:
            # Some decoders drop the space with which a text begins: behind itself it is there.
            alone, twice = (self.vocabulary.decode([token] * count) for count in (1, 2))
            text = twice.removeprefix(alone) if twice.startswith(alone) else alone
            self._texts[token] = text
        return text

    def bytes(self, token: int) -> list[int] | None:
        """None where a tokenizer does not tell the bytes of a part of a character."""
        text = self.text(token)
        if BROKEN not in text:
            return list(text.encode())
        (piece,) = self.vocabulary.convert_ids_to_tokens([token])
        if isinstance(piece, bytes):
            return list(piece)
        if (byte := BYTE.fullmatch(piece)) is not None:
            return [int(byte[1], 16)]
        if BROKEN in piece:
            return list(text.encode())
        return [BYTES[letter] for letter in piece] if BYTES.keys() >= set(piece) else None
