"""Texts of API requests as token ids, and single tokens as texts and bytes."""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from typing import Any, NamedTuple

from tokenizers.pre_tokenizers import ByteLevel
from transformers import PreTrainedTokenizerBase
from transformers.convert_slow_tokenizer import bytes_to_unicode

from draftsmith.chats import Message, rendered
from draftsmith.errors import UserError
from draftsmith.text_stream import BROKEN


class TokenPrompt(NamedTuple):
    tokens: list[int]
    text: str | None  # that the client sent, or its chat as text; None where it sent tokens


def completion_prompts(
    prompt: str | list[str] | list[int] | list[list[int]],
    tokenizer: PreTrainedTokenizerBase,
    *,
    add_special_tokens: bool = True,
    most_characters: int | None = None,
) -> list[TokenPrompt]:
    """Prompts of one request, given as one or several, as text or as ids. One of more than
    `most_characters` is refused."""
    if not prompt and not isinstance(prompt, str):
        raise UserError("prompt is an empty list; give a text or token ids")
    items = [prompt] if isinstance(prompt, str) or isinstance(prompt[0], int) else prompt
    for item in items:
        check_length(item, most_characters)
    return [
        TokenPrompt(encode(item, tokenizer, add_special_tokens=add_special_tokens), item)
        if isinstance(item, str)
        else TokenPrompt(list(item), None)
        for item in items
    ]


def conversation_prompt(
    messages: Sequence[Message],
    tokenizer: PreTrainedTokenizerBase,
    *,
    tools: Sequence[dict[str, Any]] = (),
    variables: dict[str, Any] | None = None,
    add_generation_prompt: bool | None = None,
    continue_final_message: bool = False,
    add_special_tokens: bool = False,
    most_characters: int | None = None,
    where: str = "messages",
) -> TokenPrompt:
    """Prompt of plain messages by the tokenizer's chat template, whose own `variables` are given.
    It asks for an answer by default, unless the final message is continued. `where` names
    the messages in errors."""
    if tokenizer.chat_template is None:
        raise UserError(
            f"{where} need a chat template, which this model's tokenizer has not; give the prompt "
            "as text, to /v1/completions over HTTP"
        )
    text = rendered(
        messages,
        tokenizer,
        tools=tools,
        add_generation_prompt=not continue_final_message
        if add_generation_prompt is None
        else add_generation_prompt,
        continue_final_message=continue_final_message,
        variables=variables,
        where=where,
    )
    check_length(text, most_characters)
    return TokenPrompt(encode(text, tokenizer, add_special_tokens=add_special_tokens), text)


def encode(text: str, tokenizer: PreTrainedTokenizerBase, *, add_special_tokens: bool) -> list[int]:
    return list(tokenizer(text, add_special_tokens=add_special_tokens)["input_ids"])


def check_length(prompt: Any, most: int | None) -> None:
    if most is not None and isinstance(prompt, str) and len(prompt) > most:
        raise UserError(
            f"prompt has {len(prompt)} characters and the context holds at most {most} in the "
            "longest tokens; shorten it"
        )


# How many characters of a text one of the normalised text may stand for: an accented letter is
# composed of up to four. Normalisers that are not here may drop any number.
COMPOSED = {"NFC": 4, "NFKC": 4, "NFD": 1, "NFKD": 1, "Prepend": 1, "Lowercase": 1, "ByteLevel": 1}
KEEPING = ("ByteLevel", "Metaspace", "Digits", "Split", "Punctuation")


def most_characters(tokenizer: PreTrainedTokenizerBase, num_tokens: int) -> int | None:
    """Characters of the longest text that may have `num_tokens`. None where a token may stand for
    any number: the unknown one, one that takes the space around it, a normaliser that drops."""
    if not tokenizer.is_fast:
        return None
    form = json.loads(tokenizer.backend_tokenizer.to_str())
    normalizers = _flat(form["normalizer"], "normalizers")
    pieces = _flat(form["pre_tokenizer"], "pretokenizers")
    model = form["model"]
    kept = all(
        one["type"] in KEEPING and one.get("behavior") != "Removed" for one in pieces
    ) and not any(token["lstrip"] or token["rstrip"] for token in form["added_tokens"])
    vocabulary = tokenizer.get_vocab()
    by_bytes = any(one["type"] == "ByteLevel" for one in [*normalizers, *pieces])
    spelled = by_bytes and all(letter in vocabulary for letter in ByteLevel.alphabet())
    spelled |= bool(model.get("byte_fallback")) and "<0x00>" in vocabulary
    if model["type"] != "BPE" or not kept or not spelled:
        return None
    factor = 1
    for one in normalizers:
        swapped = one.get("pattern", {}).get("String") if one["type"] == "Replace" else None
        if swapped is not None and len(one["content"]) >= len(swapped):
            continue
        if one["type"] not in COMPOSED:
            return None
        factor *= COMPOSED[one["type"]]
    return num_tokens * factor * max(map(len, vocabulary))


def _flat(part: dict[str, Any] | None, name: str) -> list[dict[str, Any]]:
    if part is None:
        return []
    return part[name] if part["type"] == "Sequence" else [part]


def bad_word_tokens(
    words: Sequence[str], tokenizer: PreTrainedTokenizerBase
) -> tuple[tuple[int, ...], ...]:
    """The tokens of each word at the beginning of a text and, as vLLM has it, of those after a
    space where that is another first token and as many of them."""
    if not words:
        return ()
    sequences: list[tuple[int, ...]] = []
    texts = [space + word.lstrip() for word in words for space in ("", " ")]
    ids = iter(map(tuple, tokenizer(texts, add_special_tokens=False)["input_ids"]))
    for word, first, spaced in zip(words, ids, ids):
        if not first:
            raise UserError(f"bad_words holds {word!r}, which has no tokens; leave it out")
        sequences.append(first)
        if len(spaced) == len(first) and spaced[0] != first[0]:
            sequences.append(spaced)
    return tuple(sequences)


BYTES = {letter: number for number, letter in bytes_to_unicode().items()}
BYTE = re.compile(r"<0x([0-9A-Fa-f]{2})>")


class TokenTexts:
    """Texts and bytes of single tokens, as they are within a text."""

    def __init__(self, vocabulary: PreTrainedTokenizerBase):
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
        """None where a tokenizer does not give the bytes of a part of a character."""
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
