"""Grammars: masks behind any drafted prefix, the end of the text, and what is refused."""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Callable
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import PreTrainedTokenizerBase

from draftsmith.drafters.target.target import Target
from draftsmith.errors import UserError
from draftsmith.serve.config import EngineConfig
from draftsmith.serve.engine.build import build_engine
from draftsmith.serve.requests.request import Completion, FinishReason
from draftsmith.serve.sampling.grammar import Grammar
from draftsmith.serve.sampling.grammar_matcher import GrammarCompiler, GrammarMatcher
from draftsmith.serve.sampling.params import SamplingParams
from tests.stand_in_drafts import Offering

SCHEMA = {
    "type": "object",
    "properties": {"n": {"type": "integer"}, "s": {"enum": ["x", "yy"]}},
    "required": ["n", "s"],
    "additionalProperties": False,
}


PATTERN = "[ab]{2,5}c|d+"


@pytest.fixture(scope="module")
def tokenizer(target: Target) -> PreTrainedTokenizerBase:
    return target.tokenizer()


@pytest.fixture(scope="module")
def compiler(target: Target, tokenizer: PreTrainedTokenizerBase) -> GrammarCompiler:
    return GrammarCompiler(tokenizer, target.vocab_size, target.eos_token_ids)


@pytest.fixture(scope="module")
def texts(target: Target, tokenizer: PreTrainedTokenizerBase) -> list[str]:
    """What each token decodes to; special ones to nothing."""
    return [
        tokenizer.decode([token], skip_special_tokens=True) for token in range(target.vocab_size)
    ]


def can_begin(text: str) -> bool:
    """Whether some match of PATTERN begins with `text`, by counting: re has no partial match."""
    return bool(re.fullmatch("[ab]{0,5}|[ab]{2,5}c|d+", text))


def expected_mask(text: str, texts: list[str], eos: int) -> np.ndarray:
    allowed = np.array([bool(more) and can_begin(text + more) for more in texts])
    allowed[eos] = bool(re.fullmatch(PATTERN, text))
    return allowed


def test_every_mask_is_what_enumeration_of_the_vocabulary_gives(
    compiler: GrammarCompiler, texts: list[str], tokenizer: PreTrainedTokenizerBase
) -> None:
    matcher = compiler.compile(Grammar.regex(PATTERN))
    a, b, c, d = (tokenizer.convert_tokens_to_ids(letter) for letter in "abcd")
    prefixes = [[], [a], [a, b], [a, b, c], [a, a], [d], [d, d], [b, b, b, b, b], [a]]
    masks = matcher.masks(prefixes)
    for prefix, mask in zip(prefixes, masks):
        assert (mask == expected_mask("".join(texts[token] for token in prefix), texts, 0)).all(), (
            prefix
        )
    # Committed text shortens the prefixes and changes nothing.
    matcher.commit([a])
    assert (matcher.masks([[b], [b, c]]) == masks[2:4]).all()


@settings(max_examples=60, deadline=None)
@given(st.lists(st.lists(st.sampled_from("abcde"), max_size=7), max_size=8))
def test_prefixes_in_any_order_leave_no_trace(
    compiler: GrammarCompiler, tokenizer: PreTrainedTokenizerBase, words: list
) -> None:
    prefixes = [tokenizer.convert_tokens_to_ids(word) for word in words]
    matcher = compiler.compile(Grammar.regex(PATTERN))
    before = matcher.masks([[]])
    together = matcher.masks(prefixes)
    for prefix, mask in zip(prefixes, together):
        assert (compiler.compile(Grammar.regex(PATTERN)).masks([prefix])[0] == mask).all()
    assert (matcher.masks([[]]) == before).all()


def test_nothing_is_forbidden_behind_a_prefix_that_leaves_the_grammar(
    compiler: GrammarCompiler,
) -> None:
    assert compiler.compile(Grammar.regex(PATTERN)).masks([[7, 7, 7]]).all()


def fail_behind(monkeypatch: pytest.MonkeyPatch, token: int) -> list[int]:
    """The library gives up, as it does over its limits, when it walks over `token`; which is for
    good. Gets a list of such walks."""
    walk, walks = GrammarMatcher._walk, []

    def limited(matcher: GrammarMatcher, path: list[int], prefix: list[int]) -> bool:
        if token in prefix:
            walks.append(len(prefix))
            matcher._matcher.consume_token(matcher._compiler.end + 10_000)
        return walk(matcher, path, prefix)

    monkeypatch.setattr(GrammarMatcher, "_walk", limited)
    return walks


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_a_grammar_that_fails_behind_drafts_that_fall_changes_nothing(
    temperature: float,
    target: Target,
    tokenizer: PreTrainedTokenizerBase,
    fixed_drafter: Callable,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The draft offers `b`, which the request's bias keeps out of the text but not the grammar out
    of the draft's."""
    (b,) = tokenizer.convert_tokens_to_ids(["b"])
    walks = fail_behind(monkeypatch, b)

    params = SamplingParams(
        temperature=temperature,
        seed=3,
        max_tokens=12,
        grammar=Grammar.regex("[ab]{12,20}"),
        logit_bias=((b, -100.0),),
    )
    plain = answers(target, None, params, k=0)
    assert not walks
    drafted = answers(target, Offering(b), params, k=3)
    assert walks and [one.finish_reason for one in drafted] == [FinishReason.LENGTH] * len(drafted)
    assert temperature > 0 or [one.tokens for one in drafted] == [one.tokens for one in plain]
    assert all(b not in one.tokens for one in drafted)
    kept = answers(target, Offering(b), replace(params, logit_bias=((b, 100.0),)), k=3)
    assert all(
        one.finish_reason is FinishReason.ERROR and set(one.tokens) == {b} for one in kept
    ), "a text that holds it ends"


@pytest.mark.parametrize(
    ("grammar", "told"),
    [
        (Grammar.json_schema({"type": "object", "not": {"type": "string"}}), "not"),
        (Grammar.json_schema({"type": "string", "format": "frobnicate"}), "frobnicate"),
        (Grammar.json_schema({"type": "nothing"}), "nothing"),
        # It asks the library to leave out what it cannot do.
        (
            Grammar.json_schema(
                {"x-guidance": {"lenient": True}, "type": "array", "uniqueItems": True}
            ),
            "uniqueItems",
        ),
        (Grammar.regex("(?=a)"), "look-around"),
        (Grammar.lark('start: "a'), "cannot be honoured"),
        # The library fails on any text of it.
        (
            Grammar.json_schema(
                {
                    "type": "object",
                    "properties": {f"p{at}": {"type": "string"} for at in range(900)},
                }
            ),
            "Current row has",
        ),
    ],
)
def test_what_the_library_cannot_honour_is_refused(
    compiler: GrammarCompiler, grammar: Grammar, told: str
) -> None:
    with pytest.raises(UserError, match=told):
        compiler.compile(grammar)


def test_combinations_that_contradict_a_grammar_are_refused() -> None:
    with pytest.raises(UserError, match="ignore_eos"):
        SamplingParams(grammar=Grammar.json_object(), ignore_eos=True)
    with pytest.raises(UserError, match="min_tokens"):
        SamplingParams(grammar=Grammar.json_object(), min_tokens=1)
    with pytest.raises(UserError, match="choice"):
        Grammar.choice([])


def answers(target: Target, drafter: object, params: SamplingParams, *, k: int) -> list[Completion]:
    engine = build_engine(target, drafter, EngineConfig(k=k, max_batch=8, max_length=160))
    done = engine.generate([[5 + n, 6, 7] for n in range(4)], params)
    assert not engine.stats.fallbacks
    return done


def is_valid(text: str) -> bool:
    value = json.loads(text)
    return set(value) == {"n", "s"} and isinstance(value["n"], int) and value["s"] in ("x", "yy")


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_every_finished_answer_is_in_the_grammar_with_drafts_that_know_nothing_of_it(
    target: Target, fixed_drafter: Callable, temperature: float
) -> None:
    params = SamplingParams(
        temperature=temperature, seed=1, grammar=Grammar.json_schema(SCHEMA), max_tokens=100
    )
    done = answers(target, fixed_drafter(), params, k=4)
    texts = [one.text for one in done if one.finish_reason is FinishReason.STOP]
    assert all(is_valid(text) for text in texts)
    assert any(texts) or temperature == 0.0
    if temperature == 0.0:
        assert [one.tokens for one in done] == [
            one.tokens for one in answers(target, None, params, k=0)
        ]


def test_a_model_without_an_end_token_stops_at_the_end_of_the_grammar(
    target: Target, fixed_drafter: Callable, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(target, "eos_token_ids", ())
    params = SamplingParams(grammar=Grammar.choice(["def x", "import"]), seed=1)
    for k in (0, 4):
        done = answers(target, fixed_drafter() if k else None, params, k=k)
        assert {one.text for one in done} <= {"def x", "import"}
        assert {one.finish_reason for one in done} == {FinishReason.STOP}


def test_a_stop_token_ends_a_grammar_early(
    target: Target, tokenizer: PreTrainedTokenizerBase, fixed_drafter: Callable
) -> None:
    stop = tokenizer.convert_tokens_to_ids("c")
    params = SamplingParams(grammar=Grammar.regex("[ab]{2}cd"), stop_token_ids=(stop,), seed=1)
    done = answers(target, fixed_drafter(), params, k=4)
    assert all(re.fullmatch("[ab]{2}c", one.text) and one.tokens[-1] == stop for one in done)


def test_without_the_library_the_request_is_told_how_to_get_it(
    tokenizer: PreTrainedTokenizerBase, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "llguidance", None)
    with pytest.raises(UserError, match="pip install"):
        GrammarCompiler(tokenizer, 288, (0,))


def test_an_end_token_that_is_ordinary_text_may_come_only_at_the_end(
    tokenizer: PreTrainedTokenizerBase, target: Target
) -> None:
    letter = tokenizer.convert_tokens_to_ids("a")
    matcher = GrammarCompiler(tokenizer, target.vocab_size, (letter, 0)).compile(
        Grammar.regex("a?b")
    )
    assert not matcher.masks([[]])[0, [letter, 0]].any()
    assert matcher.masks([[tokenizer.convert_tokens_to_ids("b")]])[0].nonzero()[
        0
    ].tolist() == sorted([letter, 0])
