"""Suffix decoding against a search of everything; memory and time are bounded; requests share what
they may."""

from __future__ import annotations

import itertools
from collections.abc import Sequence

import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from draftsmith.drafters.interface import Remembering
from draftsmith.drafters.options import SuffixOptions
from draftsmith.drafters.text.ngram import Ngram
from draftsmith.drafters.text.suffix import MAX_OCCURRENCES, Suffix, SuffixIndex
from draftsmith.errors import UserError
from tests.first_rounds import text_round


def propose(
    drafter: Suffix | Ngram,
    histories: list[list[int]],
    num_draft: list[int],
    names: Sequence[str] = (),
    shares: Sequence[bool] = (),
):
    return drafter.propose(
        text_round(histories, num_draft, request_ids=list(names), shares=list(shares))
    )


def drafted(drafter: Suffix | Ngram, history: list[int], k: int, name: str = "") -> list[int]:
    proposal = propose(drafter, [history], [k], [name] if name else [])
    return proposal.tokens[0, : proposal.lengths[0]].tolist()


def continuations(
    texts: Sequence[Sequence[int]], context: Sequence[int], *, skip: tuple[int, int] | None
) -> list[list[int]]:
    """What followed every occurrence of `context`, newest first. `skip` is (text, end) of an
    occurrence that does not count."""
    found = []
    for number in reversed(range(len(texts))):
        text = texts[number]
        for end in range(len(text), len(context) - 1, -1):
            if (number, end) != skip and list(text[end - len(context) : end]) == list(context):
                found.append(list(text[end:]))
    return found


def reference(
    texts: Sequence[Sequence[int]], history: Sequence[int], k: int, options: SuffixOptions
):
    """(tokens, score) by looking at every context length and every occurrence. The newest text's
    own end is no occurrence."""
    best: tuple[list[int], float] = ([], 0.0)
    skip = (len(texts) - 1, len(texts[-1])) if texts else None
    for length in range(min(options.max_tree_depth, len(history)), 0, -1):
        rows = continuations(texts, history[-length:], skip=skip)
        tokens, score, prob = [], 0.0, 1.0
        for depth in range(min(k, int(length * options.max_spec_factor + options.max_spec_offset))):
            following = [row[depth] for row in rows if len(row) > depth]
            if not following:
                break
            token = max(dict.fromkeys(following), key=following.count)
            prob *= following.count(token) / len(rows)
            if prob < options.min_token_prob:
                break
            tokens, score = [*tokens, token], score + prob
            rows = [row for row in rows if len(row) > depth and row[depth] == token]
        if score > best[1] + 1e-12:
            best = tokens, score
    return best


OPTIONS = st.builds(
    SuffixOptions,
    max_tree_depth=st.integers(1, 24),
    max_spec_factor=st.sampled_from([0.5, 1.0, 2.0]),
    max_spec_offset=st.sampled_from([0.0, 1.0]),
    min_token_prob=st.sampled_from([0.0, 0.1, 0.4, 0.9]),
)
# With these the scores of two drafts once differed by rounding alone, and the shorter context won.
ROUNDED_OWN = SuffixOptions(
    max_tree_depth=3, max_spec_factor=2.0, max_spec_offset=0.0, min_token_prob=0.0
)
ROUNDED_SHARED = SuffixOptions(
    max_tree_depth=8, max_spec_factor=0.5, max_spec_offset=1.0, min_token_prob=0.0
)


def texts_of(last: int, max_size: int) -> st.SearchStrategy[list[int]]:
    """Texts of the tokens 0 to `last`."""
    return st.lists(st.integers(0, last), min_size=1, max_size=max_size)


@settings(max_examples=75, deadline=None)
@given(
    options=OPTIONS,
    k=st.integers(1, 6),
    history=st.integers(0, 4).flatmap(lambda last: texts_of(last, 100)),
    pieces=st.lists(st.integers(1, 60), min_size=1, max_size=100),
)
@example(options=ROUNDED_OWN, k=4, history=[0, 0, 1, 0, 0, 0, 0, 0, 0], pieces=[9])
def test_own_text_equals_a_search_of_everything(options, k, history, pieces):
    """Read in pieces of any size, as rounds commit them."""
    drafter, read, sizes = Suffix(options), 0, itertools.cycle(pieces)
    while read < len(history):
        read += min(next(sizes), len(history) - read)
        expected, _ = reference([history[:read]], history[:read], k, options)
        assert drafted(drafter, history[:read], k, "a") == expected


@settings(max_examples=75, deadline=None)
@given(
    options=OPTIONS,
    k=st.integers(1, 6),
    texts_and_history=st.integers(0, 3).flatmap(
        lambda last: st.tuples(
            st.lists(texts_of(last, 40), min_size=1, max_size=3), texts_of(last, 40)
        )
    ),
)
@example(options=ROUNDED_SHARED, k=5, texts_and_history=([[0] * 13, [0] * 13, [0] * 16], [0] * 8))
def test_shared_texts_equal_a_search_of_everything(options, k, texts_and_history):
    texts, history = texts_and_history
    drafter = Suffix(options)
    for number, text in enumerate(texts):
        drafter.finished(str(number), text)
    own = reference([history], history, k, options)
    shared = reference(texts, history, k, options)
    assert drafted(drafter, history, k) == (shared if shared[1] > own[1] + 1e-12 else own)[0]


def test_finished_requests_serve_others_and_are_forgotten_in_order():
    drafter = Suffix(SuffixOptions(max_cached_requests=2))
    assert isinstance(drafter, Remembering)
    for number in range(3):
        drafter.finished(str(number), [10 * number + 100, 10 * number + 101, 10 * number + 102])
    assert drafter.shared.num_texts == 2
    assert [drafted(drafter, [first, first + 1], 4) for first in (100, 110, 120)] == [
        [],
        [112],
        [122],
    ]


def test_what_may_not_be_kept_is_not():
    drafter = Suffix()
    assert drafted(drafter, [1, 2, 3, 1, 2], 1, "secret") == [3]
    drafter.finished("secret", [])
    assert drafted(drafter, [1, 2], 1, "other") == []
    nothing_shared = Suffix(SuffixOptions(max_cached_requests=0))
    nothing_shared.finished("a", [1, 2, 3])
    assert drafted(nothing_shared, [1, 2], 1) == []


def test_a_request_that_shares_no_text_is_drafted_from_its_own_alone():
    drafter = Suffix()
    drafter.finished("a", [1, 2, 3, 4])
    proposal = propose(
        drafter, [[1, 2], [1, 2], [2, 7, 1, 2]], [1, 1, 1], ["b", "c", "d"], [True, False, False]
    )
    assert proposal.lengths.tolist() == [1, 0, 1] and proposal.tokens[:, 0].tolist() == [3, -1, 7]


def test_requests_leave_nothing_behind():
    drafter = Suffix()
    for number in range(50):
        drafted(drafter, [1, 2, 3, 1], 2, str(number))
        drafter.finished(str(number), [1, 2, 3, 1])
    assert not drafter._own and drafter.shared.num_texts == 50


def test_rows_of_different_k():
    proposal = propose(
        Suffix(), [[1, 2, 3, 1, 2], [1, 2, 3, 1, 2], [5, 6]], [3, 0, 4], ["a", "b", "c"]
    )
    assert proposal.tokens.tolist() == [[3, 1, -1, -1], [-1] * 4, [-1] * 4]
    assert proposal.lengths.tolist() == [2, 0, 0] and proposal.logits is None
    assert propose(Suffix(), [[1, 2, 1]], [0]).tokens.shape == (1, 0)


@pytest.mark.parametrize("piece", [1, 10, 40, 300])
def test_the_ring_forgets_the_oldest_tokens_alone(piece):
    """Far more than fits, in pieces of any size: what is still held is found, as in an index of
    just that."""
    text = np.random.default_rng(0).integers(0, 5, 1500).tolist()
    index = SuffixIndex(256)
    index.begin_text()
    for begin in range(0, len(text), piece):
        index.extend(text[begin : begin + piece])
    assert index.capacity == 256 and index.end - index.oldest <= 256
    if piece >= 256:
        return  # more at once than the ring holds: only its end is read
    held = text[-256:]
    for order, size in enumerate((1, 2, 4)):
        found = index.occurrences(held[-12:], order, 3)
        ends = [
            end
            for end in range(len(held) - 1, size - 1, -1)
            if held[end - size : end] == held[-size:]
        ]
        followed = [(held[end : end + 3] + [-1] * 3)[:3] for end in ends]
        assert found.continuations.tolist() == followed[:MAX_OCCURRENCES]


@pytest.mark.parametrize(
    "wrong",
    [
        {"max_tree_depth": 0},
        {"min_token_prob": 1.5},
        {"max_spec_factor": -1.0},
        {"max_cached_requests": -1},
    ],
)
def test_bad_options(wrong):
    with pytest.raises(UserError, match=next(iter(wrong))):
        Suffix(SuffixOptions(**wrong))


# n-grams


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


def test_rows_of_different_k_by_ngrams():
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
