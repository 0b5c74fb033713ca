"""Prompts from rows of files and data sets, or from the standard-library corpora.

With `--keep-answers` they hold their answers: the assistant turns of chats, completions of prompts,
or all of a plain text.
"""

from __future__ import annotations

import hashlib
import itertools
import json
import random
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any, Protocol

from draftsmith.distill.config import GenerateOptions
from draftsmith.distill.generate.chat_mask import ChatTokenizer, Masked, masked_chat
from draftsmith.distill.generate.ways import Way, way_of
from draftsmith.drafters.vocabulary import template_takes
from draftsmith.errors import UserError
from draftsmith.prompts.corpus import CORPORA, Document, held_out
from draftsmith.prompts.sources import read_rows

# Enough text for any tokenizer to fill a window: a token is seldom longer.
CHARACTERS_A_TOKEN = 12


class Tokenizer(ChatTokenizer, Protocol):
    """Part of a transformers tokenizer that prompts need."""

    chat_template: Any


@dataclass(frozen=True)
class Prompt:
    name: str  # of its document; prompts of one document never lie on both sides of a split
    held_out: bool
    ids: list[int]
    mask: list[int] | None = None  # of a text that holds its answers: 1 = a token of theirs
    way: Way | None = None  # None of a text that holds its answers


def load(
    config: GenerateOptions, tokenizer: Tokenizer, *, eos_token_ids: Sequence[int] = ()
) -> list[Prompt]:
    """Prompts in a fixed order that depends on the options alone."""
    _check_thinking(config, tokenizer)
    found = (
        _from_corpus(config, tokenizer)
        if config.prompts in CORPORA
        else _from_rows(config, tokenizer, eos_token_ids)
    )
    prompts = [
        replace(prompt, way=way_of(config, number)) if prompt.mask is None else prompt
        for number, prompt in enumerate(itertools.islice(found, config.count))
    ]
    if not prompts:
        raise UserError(
            f"prompts {config.prompts!r} give no prompt for split {config.split!r}; give a source "
            "that has some"
        )
    return prompts


def _from_corpus(config: GenerateOptions, tokenizer: Tokenizer) -> Iterator[Prompt]:
    """Windows that begin at a line of a document; documents are drawn in proportion to their
    length."""
    documents = [document for document in CORPORA[config.prompts]() if _wanted(document, config)]
    if config.count is None:
        drawn: Iterable[tuple[Document, int]] = ((document, 0) for document in documents)
    else:
        drawn = _windows(documents, config, config.count)
    for document, start in drawn:
        text = document.text[start : start + config.prompt_tokens * CHARACTERS_A_TOKEN]
        ids = tokenizer.encode(text)[: config.prompt_tokens]
        if ids:
            mask = _plain(ids).mask if config.keep_answers else None
            yield Prompt(document.name, held_out(document, config.held_out), ids, mask)


def _windows(
    documents: list[Document], config: GenerateOptions, count: int
) -> Iterator[tuple[Document, int]]:
    if not documents:
        return
    rng = random.Random(f"{config.seed} {config.prompts}")
    lengths = [len(document.text) for document in documents]
    # A few more than needed: a window at the very end of a document may turn out empty.
    for document in rng.choices(documents, weights=lengths, k=count + 64):
        reach = max(1, len(document.text) - config.prompt_tokens * CHARACTERS_A_TOKEN)
        start = rng.randrange(reach)
        yield document, document.text.rfind("\n", 0, start) + 1


def _from_rows(
    config: GenerateOptions, tokenizer: Tokenizer, eos_token_ids: Sequence[int]
) -> Iterator[Prompt]:
    ways = (way_of(config, number) for number in itertools.count())
    for where, row in read_rows(config.prompts, split=config.prompts_split):
        text = next(row[name] for name in ("messages", "prompt", "text") if name in row)
        key = _asked_in(text)
        # Named by what it asks, so that a repeated prompt falls into one part, whatever its answer.
        document = Document(hashlib.sha256(key.encode()).hexdigest()[:16], key)
        if not key or not _wanted(document, config):
            continue
        if config.keep_answers:
            masked = _with_answer(row, config, tokenizer, eos_token_ids, where=where)
            yield Prompt(
                document.name, held_out(document, config.held_out), masked.ids, masked.mask
            )
        elif "messages" in row or "prompt" in row:
            thinking = next(ways).thinking
            ids = _encode(text, config, tokenizer, thinking)
            yield Prompt(document.name, held_out(document, config.held_out), ids)
        else:
            raise UserError(
                f"{where} holds a text and no prompt; give --keep-answers to train on the text "
                "itself"
            )


def _with_answer(
    row: dict[str, Any],
    config: GenerateOptions,
    tokenizer: Tokenizer,
    eos_token_ids: Sequence[int],
    *,
    where: str,
) -> Masked:
    if "messages" in row:
        _check_template(config, tokenizer)
        return masked_chat(row["messages"], tokenizer, eos_token_ids, where=where)
    if "completion" in row:
        prompt = _encode(row["prompt"], config, tokenizer, None)
        answer = tokenizer.encode(row["completion"], add_special_tokens=False)
        mask = [0] * len(prompt) + [1] * len(answer)
        mask[:1] = [0]  # without a prompt the first token has nothing to be predicted from
        return Masked([*prompt, *answer], mask)
    if "text" in row:
        return _plain(list(tokenizer.encode(row["text"])))
    raise UserError(
        f"{where} holds no answer; give `messages`, `prompt` and `completion`, or `text`, or drop "
        "--keep-answers"
    )


def _plain(ids: list[int]) -> Masked:
    """Text without a prompt; its first token is not predicted."""
    return Masked(ids, [0] + [1] * (len(ids) - 1))


def _wanted(document: Document, config: GenerateOptions) -> bool:
    return config.split == "all" or held_out(document, config.held_out) == (
        config.split == "held-out"
    )


def _before_answer(turns: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Turns without the answers at the end."""
    return list(itertools.dropwhile(lambda turn: turn["role"] == "assistant", reversed(turns)))[
        ::-1
    ]


def _asked_in(text: str | list[dict[str, Any]]) -> str:
    """Text of a prompt, the same for a chat of one question, with or without its answer, and for
    the question alone."""
    if isinstance(text, str):
        return text
    turns = _before_answer(text)
    if len(turns) == 1 and turns[0]["role"] == "user" and isinstance(turns[0].get("content"), str):
        return turns[0]["content"]
    return json.dumps(turns, sort_keys=True)


def _encode(
    text: str | list[dict[str, Any]],
    config: GenerateOptions,
    tokenizer: Tokenizer,
    thinking: bool | None,
) -> list[int]:
    """Prompt as the target reads it before it answers. Answers at the end of a chat are left
    out."""
    if isinstance(text, str):
        is_chat = config.chat == "always" or (
            config.chat == "auto" and tokenizer.chat_template is not None
        )
        if not is_chat:
            if thinking is not None:
                raise _without_chats(config)
            return list(tokenizer.encode(text))
        text = [{"role": "user", "content": text}]
    _check_template(config, tokenizer)
    turns = _before_answer(text)
    if not turns:
        raise UserError(
            f"a chat of {config.prompts!r} holds nothing but answers; remove it, or give it a "
            "user turn"
        )
    variables = {} if thinking is None else {"enable_thinking": thinking}
    return list(
        tokenizer.apply_chat_template(
            turns, add_generation_prompt=True, tokenize=True, return_dict=False, **variables
        )
    )


def _without_chats(config: GenerateOptions) -> UserError:
    return UserError(
        f"--thinking {config.thinking} is a variable of the chat template and prompts "
        f"{config.prompts!r} are given without one; leave it out, or give chats"
    )


def _check_thinking(config: GenerateOptions, tokenizer: Tokenizer) -> None:
    if config.thinking is None:
        return
    if config.prompts in CORPORA:
        raise _without_chats(config)
    if tokenizer.chat_template is not None and not template_takes(
        tokenizer.get_chat_template(), "enable_thinking"
    ):
        raise UserError(
            f"--thinking {config.thinking}: the chat template of target {config.target!r} has no "
            "enable_thinking; leave it out"
        )


def _check_template(config: GenerateOptions, tokenizer: Tokenizer) -> None:
    if tokenizer.chat_template is None:
        raise UserError(
            f"prompts {config.prompts!r} hold messages but target {config.target!r} has no chat "
            "template; give plain prompts"
        )
