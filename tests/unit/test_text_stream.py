from __future__ import annotations

import contextlib
import itertools
from collections.abc import Sequence

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import PreTrainedTokenizerFast

from draftsmith.text_stream import BROKEN, ShowsTokens, TextStream
from tests.tokenizer_kinds import ALL, BYTES, FALLBACKS, LETTERS, TOKENIZER, WORDS


def decode(tokens: list[int], tokenizer: PreTrainedTokenizerFast = TOKENIZER) -> str:
    return tokenizer.decode(tokens, skip_special_tokens=True, clean_up_tokenization_spaces=False)


def streamed(
    tokens: list[int],
    sizes: list[int],
    tokenizer: PreTrainedTokenizerFast,
    context: Sequence[int] = (),
    *,
    ends: bool = True,
) -> str:
    stream = TextStream(tokenizer, context=context)
    text = "".join(stream.push(piece).text for piece in chunks(tokens, sizes))
    return text + stream.finish() if ends else text


def chunks(tokens: list[int], sizes: list[int]) -> list[list[int]]:
    pieces, begin = [], 0
    while begin < len(tokens):
        size = sizes[len(pieces) % len(sizes)]
        pieces.append(tokens[begin : begin + size])
        begin += size
    return pieces


@settings(max_examples=150, deadline=None)
@given(
    text=st.text(alphabet="aEND é", max_size=40),
    stop=st.lists(
        st.sampled_from(["END", "ND", "EE", " é", "DaE"]), min_size=1, max_size=3, unique=True
    ),
    sizes=st.lists(st.integers(1, 6), min_size=1, max_size=4),
    keep=st.booleans(),
)
def test_text_ends_before_the_first_stop_string_or_with_it(
    text: str, stop: list[str], sizes: list[int], keep: bool
) -> None:
    tokens = TOKENIZER(text, add_special_tokens=False)["input_ids"]
    stream = TextStream(TOKENIZER, stop=stop, keep_stop=keep)
    out, counted, stopped = "", 0, False
    for piece in chunks(tokens, sizes):
        step = stream.push(piece)
        out, counted, stopped = out + step.text, counted + step.num_tokens, step.stopped
        if stopped:
            break
    # The first prefix of tokens whose text holds a stop string is where generation has to end.
    ends = next(
        (n for n in range(1, len(tokens) + 1) if any(s in decode(tokens[:n]) for s in stop)), None
    )
    assert stopped == (ends is not None)
    if ends is None:
        assert out + stream.finish() == text
    else:
        assert counted == ends
        whole = decode(tokens[:ends])
        found = [(whole.find(s), whole.find(s) + len(s) * keep) for s in stop if s in whole]
        assert out == whole[: min(found)[1]]


@settings(max_examples=80, deadline=None)
@given(
    st.lists(st.integers(1, 4), min_size=1, max_size=5),
    st.integers(0, 9),
    st.sampled_from([("ab",), ("b", "xaby"), ("ba", "aa")]),
)
def test_a_stop_string_ends_the_text_only_behind_the_least_tokens(
    sizes: list[int], least: int, stops: tuple[str, ...]
) -> None:
    text = "xabyaabxaby"
    tokens = TOKENIZER.convert_tokens_to_ids(list(text))
    stream = TextStream(TOKENIZER, stop=stops, min_tokens=least)
    told, count, stopped = "", 0, False
    for piece in chunks(tokens, sizes):
        step = stream.push(piece)
        told, count, stopped = told + step.text, count + step.num_tokens, step.stopped
        if stopped:
            break
    # One letter a token: the first place where a stop string ends and is long enough.
    ends = [
        end
        for end in range(least + 1, len(text) + 1)
        if any(text[:end].endswith(stop) for stop in stops)
    ]
    if not ends:
        assert not stopped and told + stream.finish() == text
        return
    begins = [ends[0] - len(stop) for stop in stops if text[: ends[0]].endswith(stop)]
    assert stopped and count == ends[0] and told == text[: min(begins)]


def test_shown_tokens_alone_have_text() -> None:
    eos, letter = TOKENIZER.eos_token_id, TOKENIZER("a")["input_ids"][0]
    for hidden, text in (((), "a<eos>a"), ((eos,), "aa")):
        stream = TextStream(ShowsTokens(TOKENIZER, hidden))
        assert stream.push([letter, eos, letter]).text + stream.finish() == text


SIZES = st.lists(st.integers(1, 9), min_size=1, max_size=4)


@settings(max_examples=300, deadline=None)
@given(data=st.data(), kind=st.sampled_from(["byte level", *FALLBACKS]), sizes=SIZES)
def test_text_is_the_whole_decoding_and_a_prompt_may_end_anywhere_in_it(
    data: st.DataObject, kind: str, sizes: list[int]
) -> None:
    tokenizer = ALL[kind]
    text = data.draw(st.text(st.sampled_from(LETTERS + "😀🇩👩\u200d ö"), max_size=60))
    tokens = tokenizer(text, add_special_tokens=False)["input_ids"]
    at = data.draw(st.integers(0, len(tokens)))
    begin = streamed(tokens[:at], sizes, tokenizer, ends=False)
    rest = streamed(tokens[at:], sizes, tokenizer, tokens[:at])
    assert begin + rest == decode(tokens, tokenizer) == text


@settings(max_examples=200, deadline=None)
@given(data=st.data(), kind=st.sampled_from(["byte level", *WORDS]), sizes=SIZES)
def test_any_tokens_join_to_their_decoding(
    data: st.DataObject, kind: str, sizes: list[int]
) -> None:
    tokens = data.draw(st.lists(st.integers(0, len(ALL[kind]) - 1), max_size=120))
    assert streamed(tokens, sizes, ALL[kind]) == decode(tokens, ALL[kind])


def by_characters(tokens: list[int], tokenizer: PreTrainedTokenizerFast) -> str:
    """Text in which broken bytes spoil those behind them, up to a token that is no byte, and none
    before them."""
    text, waiting = "", b""
    for piece in tokenizer.convert_ids_to_tokens(tokens, skip_special_tokens=True):
        if piece not in BYTES:
            text, waiting = text + BROKEN * len(waiting) + piece.replace("▁", " "), b""
            continue
        waiting += bytes([BYTES[piece]])
        with contextlib.suppress(UnicodeDecodeError):
            text, waiting = text + waiting.decode(), b""
    return text + BROKEN * len(waiting)


@settings(max_examples=300, deadline=None)
@given(
    # Often the bytes of characters, else any but a space, which has a token.
    parts=st.lists(
        st.one_of(
            st.sampled_from(["😀", "日", "é"]).map(
                lambda text: [byte + 1 for byte in text.encode()]
            ),
            st.lists(st.integers(0, 268).filter(lambda token: token != 33), max_size=2),
        ),
        max_size=12,
    ),
    kind=st.sampled_from(sorted(FALLBACKS)),
    sizes=SIZES,
)
def test_a_broken_byte_spoils_no_character_before_it(
    parts: list[list[int]], kind: str, sizes: list[int]
) -> None:
    tokens, tokenizer = list(itertools.chain(*parts)), FALLBACKS[kind]
    expected = by_characters(tokens, tokenizer)
    text = streamed(tokens, sizes, tokenizer)
    assert text == (expected.removeprefix(" ") if kind == "llama" else expected)


@pytest.mark.parametrize("letter", ["😀", "本"])
@pytest.mark.parametrize("kind", ["byte level", *FALLBACKS])
def test_characters_of_bytes_come_one_by_one_and_the_last_may_be_cut_off(
    kind: str, letter: str
) -> None:
    *tokens, last = ALL[kind](letter * 40, add_special_tokens=False)["input_ids"]
    stream = TextStream(ALL[kind])
    pieces = [piece for token in tokens if (piece := stream.push([token]).text)]
    assert pieces == [letter] * 39 and stream.push([last]).text == letter
    cut = streamed(tokens, [7], ALL[kind])
    assert cut.rstrip(BROKEN) == letter * 39 and len(cut) > 39


@pytest.mark.parametrize("kind", ["byte level", *FALLBACKS])
def test_bytes_cost_no_more_than_others_and_are_given_without_a_character_too(kind: str) -> None:
    longest = 0

    class Counted:
        def decode(self, token_ids: Sequence[int], **options: bool) -> str:
            nonlocal longest
            longest = max(longest, len(token_ids))
            return ALL[kind].decode(token_ids, **options)

    (broken,) = ALL[kind].convert_tokens_to_ids(["ÿ" if kind == "byte level" else "<0xFF>"])
    stream = TextStream(Counted())
    given = "".join(stream.push([broken]).text for _ in range(400))
    tokens = ALL[kind]("本" * 99, add_special_tokens=False)["input_ids"]
    assert {streamed(tokens, [size], Counted()) for size in (1, 2, 3)} == {"本" * 99}
    assert len(given) > 300 and set(given) == {BROKEN} and longest < 120


@pytest.mark.parametrize("kind", sorted(ALL))
def test_hidden_tokens_take_no_space_along_and_cost_no_more_than_others(kind: str) -> None:
    tokenizer = ALL[kind]
    (letter,) = tokenizer.convert_tokens_to_ids(
        ["▁a" if kind in (*FALLBACKS, "metaspace") else "a"]
    )
    tokens = [letter, *[tokenizer.eos_token_id] * 200, letter]
    assert streamed(tokens, [1], tokenizer) == decode(tokens, tokenizer)
