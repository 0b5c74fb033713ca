"""Public prompts to train a draft on (`published:train`): under permissive licences, and none that
shares a run of words with a prompt of an evaluation suite."""

from __future__ import annotations

import hashlib
import itertools
import re
from collections.abc import Iterable, Iterator

from draftsmith.prompts.published import SUITES, TRAINING, Suite
from draftsmith.prompts.shapes import Row, normalised
from draftsmith.prompts.sources import read_file, read_rows
from draftsmith.prompts.suites import Question, files_of, questions_in

NAME = "published:train"
RUN = 8  # words in a row that two prompts share by copying alone
WORD = re.compile(r"\w+")


def rows_to_train(source: str, *, split: str = "train") -> Iterator[tuple[str, Row]]:
    """Rows of the published prompts, or of any source that `read_rows` takes."""
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
