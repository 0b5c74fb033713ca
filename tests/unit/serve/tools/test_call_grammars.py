"""Grammars of calls: whatever they allow is read as calls, and nothing else is allowed."""

from __future__ import annotations

import copy
import random
from typing import Any

import pytest
from transformers import AddedToken, PreTrainedTokenizerBase

from draftsmith.drafters.target.target import Target
from draftsmith.errors import UserError
from draftsmith.serve.sampling.grammar import Grammar
from draftsmith.serve.sampling.grammar_matcher import GrammarCompiler
from draftsmith.serve.tools.answer import THINK, AnswerForm, Thinking, joined
from draftsmith.serve.tools.call_format import CallFormat, Marks, Tool
from draftsmith.serve.tools.formats import Hermes, Llama, Mistral
from draftsmith.serve.tools.template import after_reasoning, call_grammar

FORMATS: dict[str, CallFormat] = {
    "hermes": Hermes(),
    "llama": Llama(),
    "mistral": Mistral(),
    "mistral-names": Mistral(arrays=False),
}
SCHEMA = {
    "type": "object",
    "properties": {"unit": {"$ref": "#/$defs/unit"}, "days": {"enum": [1, 23]}},
    "required": ["unit", "days"],
    "additionalProperties": False,
    "$defs": {"unit": {"enum": ["C", "F"]}},
}
TOOLS = (Tool("weather", SCHEMA), Tool("time", {}))
WEATHER, TIME = '{"unit": "C", "days": 23}', "{}"
CALLS = {
    "hermes": ["<tool_call>", '\n{"name": "weather", "arguments": {"unit": "C", "days": 23}}\n', "</tool_call>"],
    "llama": ['{"name": "weather", "parameters": {"unit": "C", "days": 23}}'],
    "mistral": ["[TOOL_CALLS]", '[{"name": "weather", "arguments": {"unit": "C", "days": 23}}]'],
    "mistral-names": ["[TOOL_CALLS]", "weather", "[ARGS]", WEATHER],
}  # fmt: skip
SPECIAL = ["[TOOL_CALLS]", "[ARGS]"]
ADDED = ["<tool_call>", "</tool_call>", "<think>", "</think>"]


@pytest.fixture(scope="module", params=["spelled", "added"])
def tokenizer(target: Target, request: pytest.FixtureRequest) -> PreTrainedTokenizerBase:
    """Mistral's markers are special tokens in it; Hermes' are text or, as Qwen has them, tokens."""
    own = copy.deepcopy(target.tokenizer())
    own.add_special_tokens({"additional_special_tokens": SPECIAL})
    if request.param == "added":
        tokens = [AddedToken(text, special=False, normalized=False) for text in ADDED]
        own.add_tokens(tokens)
        assert len(own(ADDED[0])["input_ids"]) == 1
    return own


@pytest.fixture(scope="module")
def marks(tokenizer: PreTrainedTokenizerBase) -> Marks:
    added = tokenizer.added_tokens_decoder
    return Marks({str(token): number for number, token in added.items()})


@pytest.fixture(scope="module")
def compiler(tokenizer: PreTrainedTokenizerBase) -> GrammarCompiler:
    return GrammarCompiler(tokenizer, len(tokenizer), [0])


def allowed(
    compiler: GrammarCompiler, tokenizer: PreTrainedTokenizerBase, grammar: Grammar, *parts: str
) -> str:
    """How far the grammar goes along: "no", "open" or "end" where the text may end."""
    tokens = [token for part in parts for token in tokenizer(part)["input_ids"]]
    masks = compiler.compile(grammar).masks([tokens[:count] for count in range(len(tokens) + 1)])
    if not all(mask[token] for mask, token in zip(masks, tokens)):
        return "no"
    return "end" if masks[-1][0] else "open"


def grammar_of(name: str, marks: Marks, tools: tuple[Tool, ...] = TOOLS, **options: Any) -> Grammar:
    options = {"forced": True, "parallel": True, **options}
    grammar = call_grammar(FORMATS[name], tools, marks, **options)
    assert grammar is not None
    return grammar


@pytest.mark.parametrize("name", FORMATS)
def test_a_forced_answer_is_calls_and_nothing_else(
    name: str, marks: Marks, compiler: GrammarCompiler, tokenizer: PreTrainedTokenizerBase
) -> None:
    grammar, call = grammar_of(name, marks), CALLS[name]
    assert allowed(compiler, tokenizer, grammar, *call) == "end"
    assert allowed(compiler, tokenizer, grammar, "Hello") == "no"
    assert allowed(compiler, tokenizer, grammar, *call, " and more") == "no"
    wrong = [part.replace("23", "24").replace("weather", "whether") for part in call]
    assert allowed(compiler, tokenizer, grammar, *wrong) == "no"
    other = [part.replace('"C"', '"K"') for part in call]
    assert allowed(compiler, tokenizer, grammar, *other) == "no"
    again = {
        "hermes": "\n<tool_call>\n{",
        "llama": "; {",
        "mistral": ", {",
        "mistral-names": "[TOOL_CALLS]w",
    }[name]
    more = [*call[:-1], call[-1].removesuffix("]")] if name == "mistral" else call
    assert allowed(compiler, tokenizer, grammar, *more, again) == "open"
    alone = grammar_of(name, marks, parallel=False)
    assert allowed(compiler, tokenizer, alone, *call) == "end"
    assert allowed(compiler, tokenizer, alone, *more, again) == "no"


@pytest.mark.parametrize("name", FORMATS)
def test_a_strict_tool_leaves_text_free_and_holds_its_calls(
    name: str, marks: Marks, compiler: GrammarCompiler, tokenizer: PreTrainedTokenizerBase
) -> None:
    strict = (TOOLS[0]._replace(strict=True), TOOLS[1])
    grammar, call = grammar_of(name, marks, strict, forced=False), CALLS[name]
    assert allowed(compiler, tokenizer, grammar, "Well [1], 2 < 3.") == "end"
    assert allowed(compiler, tokenizer, grammar, *call) == "end"
    assert (
        allowed(compiler, tokenizer, grammar, *(part.replace("23", "24") for part in call)) == "no"
    )
    if name != "llama":
        assert allowed(compiler, tokenizer, grammar, "Let me see.\n", *call) == "end"
    assert call_grammar(FORMATS[name], TOOLS, marks, forced=False, parallel=True) is None
    alone = grammar_of(name, marks, forced=False, parallel=False)
    assert allowed(compiler, tokenizer, alone, *call) == "end"
    assert allowed(compiler, tokenizer, alone, *call, *call) == "no"


@pytest.mark.parametrize("name", FORMATS)
def test_a_formatted_answer_may_be_calls(
    name: str, marks: Marks, compiler: GrammarCompiler, tokenizer: PreTrainedTokenizerBase
) -> None:
    grammar = grammar_of(name, marks, forced=False, answer=Grammar.regex("[0-9]+"))
    assert allowed(compiler, tokenizer, grammar, "42") == "end"
    assert allowed(compiler, tokenizer, grammar, *CALLS[name]) == "end"
    assert allowed(compiler, tokenizer, grammar, "Hello") == "no"


def test_a_grammar_begins_behind_reasoning(
    marks: Marks, compiler: GrammarCompiler, tokenizer: PreTrainedTokenizerBase
) -> None:
    inner = grammar_of("hermes", marks, forced=False, answer=Grammar.choice(["yes"]))
    maybe, open_, done = (
        after_reasoning(inner, THINK, marks, thinking)
        for thinking in (Thinking.MAYBE, Thinking.OPEN, Thinking.DONE)
    )
    assert done == inner
    thought = "\nso <tool_ca {]\n</think>"
    for grammar, text in ((maybe, f"<think>{thought}"), (open_, thought)):
        assert allowed(compiler, tokenizer, grammar, text) == "open"
        assert allowed(compiler, tokenizer, grammar, f"{text}\n\nyes") == "end"
        assert allowed(compiler, tokenizer, grammar, f"{text}\n\n", *CALLS["hermes"]) == "end"
        assert allowed(compiler, tokenizer, grammar, f"{text}\n\nno") == "no"
    assert allowed(compiler, tokenizer, maybe, "yes") == "end"
    assert allowed(compiler, tokenizer, open_, "yes") == "open"


@pytest.mark.parametrize("name", FORMATS)
def test_every_text_of_the_grammar_is_read_as_calls(
    name: str, marks: Marks, compiler: GrammarCompiler, tokenizer: PreTrainedTokenizerBase
) -> None:
    form = AnswerForm(FORMATS[name], ["weather", "time"])
    draw = random.Random(0)
    for _ in range(3):
        matcher, tokens = compiler.compile(grammar_of(name, marks)), list[int]()
        while len(tokens) < 400:
            mask = matcher.masks([[]])[0]
            choices = mask.nonzero()[0].tolist()
            # Space between JSON's parts is allowed without end.
            token = draw.choice(
                [one for one in choices if tokenizer.decode([one]).strip()] or choices
            )
            if token == 0:
                break
            tokens.append(token)
            matcher.commit([token])
        parser = form.parser()
        piece = joined([parser.push(tokenizer.decode(tokens)), parser.finish()])
        assert piece.calls and not piece.content


def test_arguments_that_are_no_object_are_refused(marks: Marks) -> None:
    with pytest.raises(UserError, match="parameters of 'f'"):
        grammar_of("hermes", marks, (Tool("f", {"type": "string"}),))
