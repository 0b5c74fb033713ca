"""Suites: conversations with a task each, by which speculative decoding is measured; and public
prompts to train a draft on (`published:train`): under permissive licences, and none that shares a
run of words with a prompt of an evaluation suite."""

from __future__ import annotations

import hashlib
import itertools
import math
import os
import re
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, fields
from fractions import Fraction
from pathlib import Path
from typing import Any, NamedTuple

from draftsmith.config import PART, option
from draftsmith.errors import UserError
from draftsmith.prompts.corpus import TASKS as LIBRARY_TASKS
from draftsmith.prompts.corpus import stdlib_tasks
from draftsmith.prompts.published import SUITES, TRAINING, Suite, located
from draftsmith.prompts.shapes import Row, normalised, parsed
from draftsmith.prompts.sources import read_file, read_rows

FOLDER = "DRAFTSMITH_SUITES"
TASKS = ("category", "task")  # fields of a row
# Categories of MT-bench, one task in suites that have others too.
MT_BENCH = frozenset(
    ("writing", "roleplay", "reasoning", "math", "coding", "extraction", "stem", "humanities")
)
ASKING = ("system", "developer", "user")
MOST_TOKENS, FEWER = 1024, 128  # of an answer, in the papers and of other prompts
MOST_HELP = f"default: {FEWER}, of a suite {MOST_TOKENS}"


@dataclass(frozen=True, kw_only=True)
class SuiteOptions:
    suite: str | None = option(
        None,
        f"prompts in place of others, with figures by task: {', '.join(SUITES)}, fetched once into "
        f"the user's cache (or found in the folder that {FOLDER} names), or a file of rows with "
        "`turns`, a `question` or a conversation, and a `category`",
    )
    suite_share: float = option(1.0, "part of a task's prompts: 0.2 takes every fifth", limits=PART)


class Question(NamedTuple):
    """Fields of a chat request, and user turns that follow, each behind the answer before it."""

    fields: dict[str, Any]
    later: tuple[dict[str, Any], ...] = ()
    task: str = ""


class Asked(NamedTuple):
    """Questions of a suite, and a sentence that says which."""

    about: str
    questions: list[Question]


def most_tokens(options: SuiteOptions, wanted: int | None) -> int:
    return wanted or (FEWER if options.suite is None else MOST_TOKENS)


def check_suite(options: SuiteOptions, in_place_of: Sequence[str]) -> None:
    """Raises a `UserError` for options that do not go together; those of `in_place_of` are about
    other prompts."""
    if options.suite is None:
        if options.suite_share != 1:
            raise UserError("suite_share is of a suite; give suite, too")
        return
    if options.suite not in SUITES and not os.path.isfile(options.suite):
        raise UserError(
            f"suite is {options.suite!r}, no file and none of {', '.join(SUITES)}; give one of them"
        )
    defaults = {field.name: field.default for field in fields(options)}
    for name in in_place_of:
        if vars(options)[name] != defaults[name]:
            raise UserError(
                f"{name} is {vars(options)[name]!r} and chooses other prompts than the suite; "
                "leave it out (suite_share takes a part of a suite)"
            )


def read_suite(options: SuiteOptions) -> Asked:
    """Raises a `UserError` where the suite cannot be had or read."""
    assert options.suite is not None
    if (suite := SUITES.get(options.suite)) is not None:
        about = f"{options.suite} ({suite.source}, {suite.licence})"
        files = files_of(suite)
    else:
        path = Path(options.suite)
        about, files = path.name, [(path, "")]
    questions = _joined([one for path, task in files for one in questions_in(path, task)])
    chosen = shared(questions, options.suite_share)
    if not chosen:
        raise UserError(f"suite {about} holds no question; give a file with at least one")
    return Asked(f"{about}: {len(chosen)} of {len(questions)} prompts", chosen)


def files_of(suite: Suite) -> list[tuple[Path, str]]:
    """(path, task of its prompts) of each file, as `located` finds it."""
    where = os.environ.get(FOLDER) or None
    return [(located(file, suite, where), file.task) for file in suite.files]


def shared(questions: Sequence[Question], share: float) -> list[Question]:
    """The first of each task, and of those after it as many as `share` says, evenly; the same
    whenever they are asked for."""
    step, seen, found = Fraction(str(share)), Counter[str](), []
    for question in questions:
        number = seen[question.task]
        seen[question.task] += 1
        if math.floor(number * step) > math.floor((number - 1) * step):
            found.append(question)
    return found


def _joined(questions: list[Question]) -> list[Question]:
    tasks = {question.task for question in questions}
    if not tasks > MT_BENCH:
        return questions
    return [one._replace(task="mt_bench") if one.task in MT_BENCH else one for one in questions]


def questions_in(path: Path, task: str) -> Iterator[Question]:
    for where, value in read_file(path):
        own = task or _task_of(value) or path.name.partition(".")[0]
        texts = _texts_of(value)
        if texts:
            value = {name: value[name] for name in value if name != "prompt"} | {"turns": texts}
        for row in normalised(value, where):
            later = [{"role": "user", "content": text} for text in texts[1:]]
            yield _question(row, later, own, where)


def _task_of(value: Any) -> str:
    found = (value.get(name) for name in TASKS) if isinstance(value, dict) else ()
    return next((one for one in found if isinstance(one, str) and one), "")


def _texts_of(value: Any) -> list[str]:
    """Turns of a user where they are a list of texts; else nothing."""
    row = value if isinstance(value, dict) else {}
    for name in ("turns", "prompt"):
        found = row.get(name)
        if name == "turns" and isinstance(found, str):
            with suppress(ValueError, RecursionError):
                found = parsed(found)
        if isinstance(found, list) and all(isinstance(one, str) for one in found):
            return found
    return []


def _question(row: Row, later: list[Row], task: str, where: str) -> Question:
    """The turns of a conversation and those behind it, but its answers, which are to be the served
    model's."""
    prompt = [{"role": "user", "content": row["prompt"]}] if "prompt" in row else []
    turns = [turn for turn in row.get("messages", prompt) if turn["role"] in ASKING] + later
    users = [number for number, turn in enumerate(turns) if turn["role"] == "user"]
    if not users or not all(turn.get("content") for turn in turns):
        raise UserError(
            f"{where} asks nothing, or has an empty turn; give `turns`, a `question` or `messages`"
        )
    first = users[0] + 1
    if any(turn["role"] != "user" for turn in turns[first:]):
        raise UserError(
            f"{where} has a turn of the system behind its first question; put it before it"
        )
    fields = {name: row[name] for name in row if name in ("tools", "chat_template_kwargs")}
    return Question({"messages": turns[:first]} | fields, tuple(turns[first:]), task)


NAME = "published:train"
RUN = 8  # words in a row that two prompts share by copying alone
WORD = re.compile(r"\w+")


def rows_to_train(source: str, *, split: str = "train") -> Iterator[tuple[str, Row]]:
    """Rows of the published prompts, of the standard library's tasks, or of any source that
    `read_rows` takes."""
    if source == LIBRARY_TASKS:
        return ((task.name, {"prompt": task.text}) for task in stdlib_tasks())
    return published_rows() if source == NAME else read_rows(source, split=split)


def published_rows(
    training: Iterable[Suite] = TRAINING, evaluation: Iterable[Suite] = tuple(SUITES.values())
) -> Iterator[tuple[str, Row]]:
    """(where it stands, `prompt`) of every prompt once, in an order that its text decides, so that
    the first ones are a fair sample of all.

    Raises:
        UserError: a file of the prompts or of an evaluation suite cannot be had.
    """
    evaluated = {
        run
        for suite in evaluation
        for path, task in files_of(suite)
        for question in questions_in(path, task)
        for text in _asked(question)
        for run in word_runs(text)
    }
    found = itertools.chain.from_iterable(map(_prompts, training))
    seen: dict[tuple[str, ...], tuple[str, str]] = {}
    for where, text in found:
        words = tuple(_words(text))
        if words and evaluated.isdisjoint(word_runs(text)):
            seen.setdefault(words, (where, text))
    for where, text in sorted(seen.values(), key=lambda one: _digest(one[1])):
        yield where, {"prompt": text}


def word_runs(text: str) -> set[tuple[str, ...]]:
    """Runs of words in a text, or all words of a shorter one."""
    words = _words(text)
    return {tuple(words[at : at + RUN]) for at in range(max(1, len(words) - RUN + 1))}


def _words(text: str) -> list[str]:
    return WORD.findall(text.lower())


def _asked(question: Question) -> Iterable[str]:
    return (
        turn["content"]
        for turn in (*question.fields["messages"], *question.later)
        if turn["role"] == "user"
    )


def _prompts(suite: Suite) -> list[tuple[str, str]]:
    """(where it stands, text), the first by digest where the suite has more than are taken."""
    found = [
        (where, row["prompt"])
        for path, _ in files_of(suite)
        for where, value in read_file(path)
        for row in normalised(value, where)
    ]
    return sorted(found, key=lambda one: _digest(one[1]))[: suite.most]


def _digest(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()
