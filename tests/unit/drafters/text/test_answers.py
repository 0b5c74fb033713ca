"""Drafts from answers that `generate` wrote."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import example, given
from hypothesis import strategies as st

from draftsmith.drafters.target.target import Target
from draftsmith.drafters.text.answers import CAUTION, LONGEST, AnswerTable, read_answers
from draftsmith.drafters.text.suffix import Suffix
from draftsmith.errors import UserError
from tests.data_folders import rows_of, sampled_from, write_rows
from tests.first_rounds import text_round

TEXTS = st.lists(st.lists(st.integers(0, 3), max_size=30), max_size=4)


@pytest.fixture(scope="module")
def target(tiny_target: Callable[..., str]) -> Target:
    return Target.load(tiny_target("llama"), dtype=torch.float32)


@given(texts=TEXTS, context=st.lists(st.integers(0, 3), max_size=8))
@example(texts=[[1, 2, 3, 4, 5]] * 3 + [[9, 2, 3, 4, 6]] * 4, context=[1, 2, 3, 4])
def test_the_likeliest_token_is_that_of_a_count_of_everything(texts: list, context: list) -> None:
    offers = [(0.0, -1)]
    for length in range(1, min(LONGEST, len(context)) + 1):
        ends = ((text, end) for text in texts for end in range(length, len(text)))
        seen = Counter(t[end] for t, end in ends if t[end - length : end] == context[-length:])
        if seen.total() >= 2:
            token = min(seen, key=lambda one: (-seen[one], one))
            offers.append((seen[token] / (seen.total() + CAUTION / length), token))
    table = AnswerTable([np.array(text, dtype=np.int64) for text in texts])
    token, share = table.best(context)
    assert (pytest.approx(share), token) in offers and share == pytest.approx(max(offers)[0])
    searches = (Suffix(answers=table, compiled=one) for one in (True, False))
    first, second = (one.propose(text_round([context], [3])).tokens.tolist() for one in searches)
    assert first == second


def test_answers_are_read_behind_the_end_of_their_prompts(target: Target, tmp_path: Path) -> None:
    rows = rows_of([[3, 9, 8, 7, 6], [5], [5]], [[1], [6, 7], [6, 7]])
    answers = read_answers(write_rows(tmp_path / "data", rows), target)
    assert [text.tolist() for text in answers] == [[9, 8, 7, 6, 1], [5, 6, 7], [5, 6, 7]]


def test_requests_that_share_nothing_are_not_drafted_from_answers() -> None:
    suffix = Suffix(answers=AnswerTable([np.array([5, 6, 7, 8])] * 9))
    found = suffix.propose(text_round([[4, 5, 6]] * 2, [4, 4], shares=[True, False]))
    assert found.tokens.tolist() == [[7, 8, -1, -1], [-1] * 4]


@pytest.mark.parametrize(
    ("file", "content", "says"),
    [
        ("part-00000.parquet", None, "holds no part-"),
        ("part-00000.parquet", "PAR", "cannot be read"),
        ("provenance.json", '{"tokenizer_hash": "other"}', "another tokenizer"),
        ("provenance.json", "[", "provenance"),
    ],
)
def test_other_folders_are_refused(
    target: Target, tmp_path: Path, file: str, content: str | None, says: str
) -> None:
    folder = write_rows(tmp_path / "data", rows_of([[9]], [[1, 2]]), sampled_from(target))
    (folder / file).unlink()
    if content is not None:
        (folder / file).write_text(content)
    with pytest.raises(UserError, match=says):
        read_answers(folder, target)
