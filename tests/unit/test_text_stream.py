from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast

from draftsmith.text_stream import ShowsTokens, TextStream


def byte_level() -> PreTrainedTokenizerFast:
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=300,
        special_tokens=["<eos>"],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(
        ["for x in range(10): print(x)", "the stop word is END here"] * 4, trainer
    )
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="<eos>")


TOKENIZER = byte_level()


def decode(tokens: list[int]) -> str:
    return TOKENIZER.decode(tokens, skip_special_tokens=True, clean_up_tokenization_spaces=False)


def chunks(tokens: list[int], sizes: list[int]) -> list[list[int]]:
    pieces, begin = [], 0
    while begin < len(tokens):
        size = sizes[len(pieces) % len(sizes)]
        pieces.append(tokens[begin : begin + size])
        begin += size
    return pieces


@settings(max_examples=150, deadline=None)
@given(
    text=st.text(max_size=80),
    sizes=st.lists(st.integers(1, 6), min_size=1, max_size=4),
    context=st.text(max_size=9),
)
def test_pieces_join_to_the_whole_text_and_hold_no_broken_character(
    text: str, sizes: list[int], context: str
) -> None:
    tokens = TOKENIZER(text, add_special_tokens=False)["input_ids"]
    stream = TextStream(
        TOKENIZER, context=TOKENIZER(context, add_special_tokens=False)["input_ids"]
    )
    pieces = [stream.push(piece).text for piece in chunks(tokens, sizes)]
    pieces.append(stream.finish())
    assert "".join(pieces) == text == decode(tokens)
    assert all("\ufffd" not in piece for piece in pieces) or "\ufffd" in text


@settings(max_examples=100, deadline=None)
@given(
    tokens=st.lists(st.integers(1, 299), max_size=120),
    sizes=st.lists(st.integers(1, 6), min_size=1, max_size=4),
)
def test_any_tokens_even_broken_bytes_join_to_their_decoding(
    tokens: list[int], sizes: list[int]
) -> None:
    stream = TextStream(TOKENIZER)
    text = "".join(stream.push(piece).text for piece in chunks(tokens, sizes)) + stream.finish()
    assert text == decode(tokens)


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


def test_the_beginning_of_a_stop_string_is_held_until_it_is_known() -> None:
    tokens = TOKENIZER("aENaEND", add_special_tokens=False)["input_ids"]
    stream = TextStream(TOKENIZER, stop=["END"])
    seen = ""
    for token in tokens:
        seen += stream.push([token]).text
        assert not seen.endswith("E") and not seen.endswith("EN")
    assert seen == "aENa"


def test_special_tokens_give_no_text() -> None:
    stream = TextStream(TOKENIZER)
    assert stream.push([0]).text == "" and stream.finish() == ""


@pytest.mark.parametrize("text", ["日本語", "👩‍👩‍👧‍👦 family", "naïve café"])
def test_characters_of_several_tokens_come_whole(text: str) -> None:
    stream = TextStream(TOKENIZER)
    pieces = [
        stream.push([token]).text
        for token in TOKENIZER(text, add_special_tokens=False)["input_ids"]
    ]
    assert "".join(pieces) + stream.finish() == text
    assert all("\ufffd" not in piece for piece in pieces)


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
