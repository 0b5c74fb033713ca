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
from typing import Any, NamedTuple

import pyarrow as pa

from draftsmith.chat_answers import AnswerTokenizer, ChatAnswers, Masked
from draftsmith.chats import (
    Conversation,
    Message,
    conversation_of,
    source_of,
    template_takes,
    without_nulls,
)
from draftsmith.distill.config import GenerateOptions
from draftsmith.errors import UserError
from draftsmith.prompts.corpus import CORPORA, Document, held_out
from draftsmith.prompts.suites import rows_to_train

# Of prompts that the target writes itself.
SELF_PROMPTS_TEMPERATURE, SELF_PROMPTS_TOP_P = 1.0, 0.95
# Enough text for any tokenizer to fill a window: a token is seldom longer.
CHARACTERS_A_TOKEN = 12


@dataclass(frozen=True)
class Prompt:
    name: str  # of its document; prompts of one document never lie on both sides of a split
    held_out: bool
    ids: list[int]
    mask: list[int] | None = None  # of a text that holds its answers: 1 = a token of theirs
    way: Way | None = None  # None of a text that holds its answers
    ends: tuple[int, ...] = ()  # tokens that end what is written, beside the target's own


def load(
    config: GenerateOptions, tokenizer: AnswerTokenizer, *, eos_token_ids: Sequence[int] = ()
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


def _from_corpus(config: GenerateOptions, tokenizer: AnswerTokenizer) -> Iterator[Prompt]:
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
    config: GenerateOptions, tokenizer: AnswerTokenizer, eos_token_ids: Sequence[int]
) -> Iterator[Prompt]:
    answers = ChatAnswers(tokenizer, eos_token_ids)
    ways = (way_of(config, number) for number in itertools.count())
    for where, row in rows_to_train(config.prompts, split=config.prompts_split):
        found = _read(row, config, tokenizer, where)
        key = _asked_in(found)
        # Named by what it asks, so that a repeated prompt falls into one part, whatever its answer.
        document = Document(hashlib.sha256(key.encode()).hexdigest()[:16], key)
        if config.keep_answers and not key and ("completion" in row or "messages" in row):
            raise UserError(
                f"{where} holds an answer to an empty prompt; give its prompt, or remove it"
            )
        if not key or not _wanted(document, config):
            continue
        is_held_out = held_out(document, config.held_out)
        if config.keep_answers:
            for masked in _with_answers(row, found, config, answers, where):
                yield Prompt(document.name, is_held_out, masked.ids, masked.mask)
        elif "messages" in row or "prompt" in row:
            ids = _asking(found, config, answers, next(ways).thinking, where)
            yield Prompt(document.name, is_held_out, ids)
        else:
            raise UserError(
                f"{where} holds a text and no prompt; give --keep-answers to train on the text "
                "itself"
            )


def _read(
    row: dict[str, Any], config: GenerateOptions, tokenizer: AnswerTokenizer, where: str
) -> Conversation | str:
    """A conversation, or a text that no chat template wraps."""
    has_template = tokenizer.chat_template is not None
    if "messages" not in row:
        text: str = row["prompt"] if "prompt" in row else row["text"]
        is_chat = config.chat == "always" or (config.chat == "auto" and has_template)
        is_plain = "prompt" not in row or (config.keep_answers and "completion" not in row)
        if is_plain or not is_chat or not text:
            return text
        turns = [{"role": "user", "content": text}]
        if "completion" in row:
            turns.append({"role": "assistant", "content": row["completion"]})
        row = {**row, "messages": turns}
    if not has_template:
        raise UserError(
            f"prompts {config.prompts!r} hold messages but target {config.target!r} has no chat "
            "template; give plain prompts"
        )
    # Tables give each turn the keys of the others. A tool's null may be its default value.
    row = {**row, "messages": without_nulls(row["messages"])}
    return conversation_of(row, where, source_of(tokenizer.chat_template))


def _with_answers(
    row: dict[str, Any],
    found: Conversation | str,
    config: GenerateOptions,
    answers: ChatAnswers,
    where: str,
) -> list[Masked]:
    if isinstance(found, Conversation):
        (thinking,) = THINKING[config.thinking]
        return answers.texts(_thinking(found, thinking), where)
    if config.thinking is not None:
        raise _without_chats(config)
    if "completion" in row:
        return [answers.completion(list(answers.tokenizer.encode(found)), row["completion"])]
    if "text" in row:
        return [_plain(list(answers.tokenizer.encode(found)))]
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


def _before_answer(turns: list[Message]) -> list[Message]:
    """Turns without the answers at the end."""
    return list(itertools.dropwhile(lambda turn: turn["role"] == "assistant", reversed(turns)))[
        ::-1
    ]


def _asked_in(found: Conversation | str) -> str:
    """Text of a prompt, the same for a chat of one question, with or without its answer, and for
    the question alone."""
    if isinstance(found, str):
        return found
    turns = _before_answer(found.messages)
    if len(turns) == 1 and turns[0]["role"] == "user":
        return turns[0]["content"]
    return json.dumps(turns, sort_keys=True, default=str)


def _asking(
    found: Conversation | str,
    config: GenerateOptions,
    answers: ChatAnswers,
    thinking: bool | None,
    where: str,
) -> list[int]:
    """Prompt as the target reads it before it answers. Answers at the end of a chat are left
    out."""
    if isinstance(found, str):
        if thinking is not None:
            raise _without_chats(config)
        return list(answers.tokenizer.encode(found))
    turns = _before_answer(found.messages)
    if not turns:
        raise UserError(f"{where} holds nothing but answers; remove it, or give it a user turn")
    return answers.prompt(_thinking(found._replace(messages=turns), thinking), where)


def _thinking(chat: Conversation, thinking: bool | None) -> Conversation:
    if thinking is None:
        return chat
    return chat._replace(variables={**chat.variables, "enable_thinking": thinking})


def _without_chats(config: GenerateOptions) -> UserError:
    return UserError(
        f"--thinking {config.thinking} is a variable of the chat template and prompts "
        f"{config.prompts!r} are given without one; leave it out, or give chats"
    )


def _check_thinking(config: GenerateOptions, tokenizer: AnswerTokenizer) -> None:
    if config.thinking is None:
        return
    if config.prompts in CORPORA:
        raise _without_chats(config)
    if tokenizer.chat_template is not None and not template_takes(
        source_of(tokenizer.chat_template), "enable_thinking"
    ):
        raise UserError(
            f"--thinking {config.thinking}: the chat template of target {config.target!r} has no "
            "enable_thinking; leave it out"
        )


THINKING: dict[str | None, tuple[bool | None, ...]] = {
    None: (None,),
    "on": (True,),
    "off": (False,),
    "both": (True, False),
}


class Way(NamedTuple):
    temperature: float
    thinking: bool | None  # None: as the chat template does by itself


def hottest(config: GenerateOptions) -> float:
    """Highest temperature that something is drawn at."""
    asking = 0.0 if config.self_prompts is None else SELF_PROMPTS_TEMPERATURE
    return max(*config.temperatures, asking)


def way_of(config: GenerateOptions, number: int) -> Way:
    """Way of the answer to a prompt: every way comes once in as many prompts in a row, in an order
    of the seed, so that no pattern of the prompts falls together with it."""
    ways = list(itertools.product(config.temperatures, THINKING[config.thinking]))
    block, at = divmod(number, len(ways))
    order = random.Random(f"{config.seed} ways {block}").sample(range(len(ways)), len(ways))
    return Way(*ways[order[at]])


def columns_of(config: GenerateOptions) -> list[tuple[str, pa.DataType]]:
    """Columns of what differs from row to row."""
    columns = [("temperature", pa.float32())] if len(config.temperatures) > 1 else []
    return columns + ([("thinking", pa.bool_())] if config.thinking == "both" else [])


def recorded(config: GenerateOptions, way: Way | None) -> dict[str, Any]:
    """Entries of a row in these columns."""
    return {} if way is None else {name: way._asdict()[name] for name, _ in columns_of(config)}
