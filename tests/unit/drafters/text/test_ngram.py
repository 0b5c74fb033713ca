"""n-gram drafting against a plain search, and vLLM's vectors."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import pytest

from draftsmith.drafters.text.ngram import Ngram
from draftsmith.errors import UserError
from tests.first_rounds import text_round


def propose(
    drafter: Ngram, histories: list[list[int]], num_draft: list[int], names: Sequence[str] = ()
):
    return drafter.propose(text_round(histories, num_draft, request_ids=list(names)))


def drafted(drafter: Ngram, history: list[int], k: int) -> list[int]:
    proposal = propose(drafter, [history], [k])
    return proposal.tokens[0, : proposal.lengths[0]].tolist()


def plain_search(history: list[int], min_n: int, max_n: int, k: int) -> list[int]:
    for n in range(max_n, min_n - 1, -1):
        for begin in range(len(history) - n):
            if history[begin : begin + n] == history[-n:]:
                return history[begin + n : begin + n + k]
    return []


def test_equals_a_plain_search_on_random_texts():
    generator = np.random.default_rng(0)
    for _ in range(400):
        history = generator.integers(
            0, int(generator.integers(2, 6)), int(generator.integers(1, 40))
        ).tolist()
        min_n = int(generator.integers(1, 4))
        max_n = min_n + int(generator.integers(0, 4))
        k = int(generator.integers(0, 6))
        assert drafted(Ngram(min_n=min_n, max_n=max_n), history, k) == plain_search(
            history, min_n, max_n, k
        )


def test_rows_of_different_k():
    proposal = propose(
        Ngram(min_n=2),
        [[1, 2, 3, 1, 2], [1, 2, 3, 1, 2], [5, 6], [7, 8, 7, 8, 9, 7, 8]],
        [3, 0, 4, 1],
    )
    assert proposal.tokens.tolist() == [[3, 1, 2, -1], [-1] * 4, [-1] * 4, [7, -1, -1, -1]]
    assert proposal.lengths.tolist() == [3, 0, 0, 1]
    assert proposal.logits is None


def test_no_row_drafts():
    proposal = propose(Ngram(), [[1, 2, 1, 2]], [0])
    assert proposal.tokens.shape == (1, 0) and proposal.lengths.tolist() == [0]


def test_the_window_bounds_what_is_searched():
    history = [1, 2, 3] + [9, 8, 7, 6] * 10 + [1, 2]
    assert drafted(Ngram(min_n=2, max_n=2), history, 1) == [3]
    assert drafted(Ngram(min_n=2, max_n=2, window=20), history, 1) == []


def test_the_whole_of_a_long_text_is_searched():
    """Its beginning too, which is what a question about a long document quotes."""
    generator = np.random.default_rng(0)
    history = [1, 2, 3, *generator.integers(10, 1000, 32_768).tolist(), 1, 2]
    assert drafted(Ngram(min_n=2), history, 1) == [3]


@pytest.mark.parametrize(("min_n", "max_n"), [(0, 2), (3, 2)])
def test_bad_ranges(min_n, max_n):
    with pytest.raises(UserError, match="1 <= min <= max"):
        Ngram(min_n=min_n, max_n=max_n)
