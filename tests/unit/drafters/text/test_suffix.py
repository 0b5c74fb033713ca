"""Suffix decoding against a search of everything; memory and time are bounded; requests share what
they may."""

from __future__ import annotations

import itertools
from collections.abc import Sequence

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from draftsmith.drafters.interface import Remembering
from draftsmith.drafters.text.answers import CAUTION
from draftsmith.drafters.text.suffix import (
    LEAST,
    LONGEST,
    MAX_STEPS,
    MOST_ALONE,
    ORDERS,
    OWN_CAUTION,
    SEEN,
    Suffix,
    SuffixIndex,
)
from tests.first_rounds import text_round


def propose(
    drafter: Suffix,
    histories: list[list[int]],
    num_draft: list[int],
    names: Sequence[str] = (),
    shares: Sequence[bool] = (),
    least: float = 0.0,
):
    changes = {"request_ids": list(names), "shares": list(shares), "least_survival": least}
    return drafter.propose(text_round(histories, num_draft, **changes))


def drafted(
    drafter: Suffix, history: list[int], k: int, name: str = "", least: float = 0.0
) -> list[int]:
    proposal = propose(drafter, [history], [k], [name] if name else [], least=least)
    return proposal.tokens[0, : proposal.lengths[0]].tolist()


def offer(
    texts: Sequence[Sequence[int]], context: Sequence[int], caution: float
) -> tuple[int, float]:
    """Token and chance by looking at every place of `texts`, newest first."""
    best = -1, 0.0
    for size in reversed(ORDERS):
        found = []
        for text in reversed(texts):
            for end in range(len(text) - 1, size - 1, -1):
                if size <= len(context) and list(text[end - size : end]) == context[-size:]:
                    pairs = zip(reversed(text[:end]), reversed(context))
                    agreeing = itertools.takewhile(lambda pair: pair[0] == pair[1], pairs)
                    found.append((len(list(agreeing)), text[end]))
        if newest := found[:SEEN]:
            length, token = max(newest, key=lambda one: one[0])
            chance = [one[1] for one in newest].count(token) / (len(newest) + caution / length)
            best = max(best, (token, chance), key=lambda one: one[1])
    return best


def reference(
    texts: Sequence[Sequence[int]], history: list[int], k: int, least: float
) -> list[int]:
    """The draft behind `history`, with the finished `texts`."""
    tokens: list[int] = []
    survival = 1.0
    while len(tokens) < k:
        context = [*history, *tokens][-LONGEST:]
        own, shared = offer([history], context, OWN_CAUTION), offer(texts, context, CAUTION)
        token, chance = max(own, shared, key=lambda one: one[1])
        survival *= chance
        if survival < max(LEAST, min(least, MOST_ALONE)):
            break
        tokens.append(token)
    return tokens


def texts_of(last: int, max_size: int) -> st.SearchStrategy[list[int]]:
    """Texts of the tokens 0 to `last`."""
    return st.lists(st.integers(0, last), min_size=1, max_size=max_size)


K, LEASTS = st.integers(1, 6), st.sampled_from([0.0, 0.2, 0.9])
COMPILED = st.booleans()


@settings(max_examples=75, deadline=None)
@given(
    k=K,
    least=LEASTS,
    compiled=COMPILED,
    history=st.integers(0, 4).flatmap(lambda last: texts_of(last, 100)),
    pieces=st.lists(st.integers(1, 60), min_size=1, max_size=100),
)
def test_own_text_equals_a_search_of_everything(k, least, compiled, history, pieces):
    """Read in pieces of any size, as rounds commit them."""
    drafter, read, sizes = Suffix(compiled=compiled), 0, itertools.cycle(pieces)
    while read < len(history):
        read += min(next(sizes), len(history) - read)
        found = drafted(drafter, history[:read], k, "a", least)
        assert found == reference([], history[:read], k, least)


@settings(max_examples=75, deadline=None)
@given(
    k=K,
    least=LEASTS,
    compiled=COMPILED,
    texts_and_history=st.integers(0, 3).flatmap(
        lambda last: st.tuples(
            st.lists(texts_of(last, 40), min_size=1, max_size=3), texts_of(last, 40)
        )
    ),
)
def test_shared_texts_equal_a_search_of_everything(k, least, compiled, texts_and_history):
    texts, history = texts_and_history
    drafter = Suffix(compiled=compiled)
    for number, text in enumerate(texts):
        drafter.finished(str(number), text)
    assert drafted(drafter, history, k, least=least) == reference(texts, history, k, least)


def test_finished_requests_serve_others_and_are_forgotten_in_order():
    drafter = Suffix(max_cached_requests=2)
    assert isinstance(drafter, Remembering)
    for number in range(3):
        drafter.finished(str(number), [10 * number + 100, 10 * number + 101, 10 * number + 102])
    assert drafter.shared.num_texts == 2
    drafts = [drafted(drafter, [first, first + 1], 4) for first in (100, 110, 120)]
    assert drafts == [[], [112], [122]]


def test_what_may_not_be_kept_is_not():
    drafter = Suffix()
    assert drafted(drafter, [1, 2, 3, 1, 2], 1, "secret") == [3]
    drafter.finished("secret", [])
    assert drafted(drafter, [1, 2], 1, "other") == []
    nothing_shared = Suffix(max_cached_requests=0)
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


def test_a_row_alone_is_asked_for_no_more_than_corrects_a_mistaken_control():
    """The offer has a chance of 0.44."""
    text = [1, 2, 3, 1, 2]
    drafts = [propose(Suffix(), [text] * count, [1] * count, least=0.6) for count in (1, 2)]
    assert [one.lengths.tolist() for one in drafts] == [[1], [0, 0]]


def test_rows_of_different_k():
    proposal = propose(
        Suffix(), [[1, 2, 3, 1, 2], [1, 2, 3, 1, 2], [5, 6]], [3, 0, 4], ["a", "b", "c"]
    )
    assert proposal.tokens.tolist() == [[3, 1, 2, -1], [-1] * 4, [-1] * 4]
    assert proposal.lengths.tolist() == [3, 0, 0] and proposal.logits is None
    nothing = propose(Suffix(), [[1, 2, 1, 2]], [0])
    assert nothing.tokens.shape == (1, 0) and nothing.lengths.tolist() == [0]


@pytest.mark.parametrize("compiled", [True, False])
@pytest.mark.parametrize("piece", [1, 10, 40, 300])
def test_the_ring_forgets_the_oldest_tokens_alone(piece, compiled):
    """Far more than fits, in pieces of any size: what is still held is found, as in an index of
    just that."""
    text = np.random.default_rng(0).integers(0, 5, 1500).tolist()
    index = SuffixIndex(256, compiled=compiled)
    index.begin_text()
    for begin in range(0, len(text), piece):
        index.extend(text[begin : begin + piece])
    assert index.capacity == 256 and index.end - index.oldest <= 256
    if piece >= 256:
        return  # more at once than the ring holds: only its end is read
    held = text[-256:]
    for found in index.newest(held[-12:], 500):
        size = min(length for length, _ in found)
        ends = [end for end in range(255, size - 1, -1) if held[end - size : end] == held[-size:]]
        assert [token for _, token in found] == [held[end] for end in ends][: len(found)]
        assert len(found) == min(len(ends), MAX_STEPS)


def test_a_ring_that_went_round_drafts_the_same_compiled_and_not():
    drafters = [Suffix(max_cached_tokens=256, compiled=compiled) for compiled in (True, False)]
    for text in np.random.default_rng(0).integers(0, 5, (40, 60)).tolist():
        compiled, plain = (drafted(one, text[:30], 6) for one in drafters)
        assert compiled == plain
        for one in drafters:
            one.finished("", text)
    assert plain and drafters[0].shared.end > 2000


def test_the_whole_of_a_long_text_is_searched():
    """Its beginning too, which is what a question about a long document quotes."""
    generator = np.random.default_rng(0)
    history = [1, 2, 3, *generator.integers(10, 1000, 32_768).tolist(), 1, 2]
    assert drafted(Suffix(), history, 1) == [3]
