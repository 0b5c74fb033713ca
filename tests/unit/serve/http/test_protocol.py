"""From the wire to sampling parameters: nothing a request says is lost on the way."""

from __future__ import annotations

import json
import time

import pytest
from pydantic import ValidationError

from draftsmith.errors import UserError
from draftsmith.serve.http.bodies import writable
from draftsmith.serve.http.protocol import ChatRequest, CompletionRequest
from draftsmith.serve.http.streams import speculation_report
from draftsmith.serve.http.tokens import bad_word_tokens
from draftsmith.serve.requests.request import SpeculationStats
from draftsmith.serve.sampling.grammar import Grammar
from draftsmith.serve.sampling.params import SamplingParams

BASE = {"model": "m", "prompt": "x"}
CHANGES = [
    ({"temperature": 0.5}, {"temperature": 0.5}),
    ({"temperature": 0}, {"temperature": 0}),
    ({"top_k": 5}, {"top_k": 5}),
    ({"top_k": -1}, {"top_k": 0}),
    ({"top_p": 0.5}, {"top_p": 0.5}),
    ({"min_p": 0.5}, {"min_p": 0.5}),
    ({"max_tokens": 3}, {"max_tokens": 3}),
    ({"min_tokens": 3}, {"min_tokens": 3}),
    ({"stop": "a"}, {"stop": ("a",)}),
    ({"stop": ["a", "b"]}, {"stop": ("a", "b")}),
    ({"stop_token_ids": [4]}, {"stop_token_ids": (4,)}),
    ({"ignore_eos": True}, {"ignore_eos": True}),
    ({"seed": 7}, {"seed": 7}),
    ({"presence_penalty": -0.5}, {"presence_penalty": -0.5}),
    ({"frequency_penalty": 0.5}, {"frequency_penalty": 0.5}),
    ({"repetition_penalty": 1.5}, {"repetition_penalty": 1.5}),
    ({"logit_bias": {"5": -3, "6": 1.5}}, {"logit_bias": ((5, -3), (6, 1.5))}),
    ({"allowed_token_ids": [1, 2]}, {"allowed_token_ids": (1, 2)}),
    ({"logprobs": 2}, {"logprobs": 2}),
    ({"prompt_logprobs": 3}, {"prompt_logprobs": 3}),
    ({"include_stop_str_in_output": True}, {"include_stop_str_in_output": True}),
    ({"skip_special_tokens": False}, {"skip_special_tokens": False}),
    ({"logprobs": 2, "echo": True}, {"logprobs": 2, "prompt_logprobs": 2}),
    ({"max_tokens": 0, "echo": True}, {"max_tokens": 1}),
    ({"speculation": {"k": 2}}, {"k": 2}),
    ({"speculation": {"draft_temperature": 0.5}}, {"draft_temperature": 0.5}),
    ({"response_format": {"type": "text"}}, {"grammar": None}),
    ({"response_format": {"type": "json_object"}}, {"grammar": Grammar.json_object()}),
    (
        {
            "response_format": {
                "type": "json_schema",
                "json_schema": {"name": "n", "schema": {"type": "null"}},
            }
        },
        {"grammar": Grammar.json_schema({"type": "null"})},
    ),
    (
        {"structured_outputs": {"json": {"type": "null"}}},
        {"grammar": Grammar.json_schema({"type": "null"})},
    ),
    (
        {"structured_outputs": {"json": '{"type": "null"}'}},
        {"grammar": Grammar.json_schema({"type": "null"})},
    ),
    ({"structured_outputs": {"json_object": True}}, {"grammar": Grammar.json_object()}),
    ({"structured_outputs": {"regex": "a+"}}, {"grammar": Grammar.regex("a+")}),
    ({"structured_outputs": {"choice": ["a", "b"]}}, {"grammar": Grammar.choice(["a", "b"])}),
    ({"structured_outputs": {"grammar": 'start: "a"'}}, {"grammar": Grammar.lark('start: "a"')}),
]


@pytest.mark.parametrize("said, meant", CHANGES, ids=[str(said)[:50] for said, _ in CHANGES])
def test_every_parameter_reaches_the_engine(said: dict, meant: dict) -> None:
    assert CompletionRequest(**BASE, **said).sampling()[0] == SamplingParams(
        **{"max_tokens": 16, **meant}
    )


def test_no_sampling_parameter_is_out_of_reach() -> None:
    reached = {name for _, meant in CHANGES for name in meant} | {"bad_words"}
    assert set(SamplingParams.__dataclass_fields__) - reached == OURS_ALONE


# Python callables cannot come over the wire.
OURS_ALONE = {"logits_processors"}


def test_choices_of_a_seed_differ_and_repeat() -> None:
    body = CompletionRequest(**BASE, seed=3, n=3)
    seeds = [one.seed for one in body.sampling()]
    assert len(set(seeds)) == 3 and seeds == [one.seed for one in body.sampling()]


def test_a_chat_answers_until_the_context_ends_unless_told() -> None:
    messages = [{"role": "user", "content": "x"}]
    assert ChatRequest(model="m", messages=messages).sampling()[0].max_tokens is None
    assert (
        ChatRequest(model="m", messages=messages, max_completion_tokens=5).sampling()[0].max_tokens
        == 5
    )
    chat = ChatRequest(model="m", messages=messages, logprobs=True)
    assert chat.sampling()[0].logprobs == 0
    parts = [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]
    assert (
        ChatRequest(model="m", messages=[{"role": "user", "content": parts}])
        .messages[0]
        .plain()["content"]
        == "ab"
    )


def test_bad_words_are_banned_at_the_beginning_and_after_a_space() -> None:
    tokens = {"a": [5], " a": [6], "ab": [5, 7], " ab": [8], "c": [9], " c": [9], "": [], " ": [4]}

    def tokenizer(texts: list[str], *, add_special_tokens: bool) -> dict[str, list[list[int]]]:
        assert not add_special_tokens
        return {"input_ids": [tokens[text] for text in texts]}

    # Of as many tokens and with another first one: banned after a space too.
    assert bad_word_tokens([" a", "ab", "c"], tokenizer) == ((5,), (6,), (5, 7), (9,))
    with pytest.raises(UserError, match="bad_words"):
        bad_word_tokens([""], tokenizer)


def test_the_report_of_a_request_without_drafts_divides_by_nothing() -> None:
    report = speculation_report(
        SpeculationStats(num_passes=5, num_committed=5), 3, level="detailed"
    )
    assert (
        report["acceptance_histogram"] == [0, 0, 0, 0]
        and report["acceptance_histogram_by_draft_length"] == {}
    )
    assert (
        report["num_spec_steps"] == 0
        and report["tau"] is None
        and report["mean_acceptance_length"] == 1.0
    )


MANY = [
    {"logit_bias": {str(token): "x" for token in range(1000)}},
    {"prompt": [{}] * 1000},
    {"stop": [0] * 100},
    {f"name {number}": 1 for number in range(1000)},
]


@pytest.mark.parametrize("change", MANY, ids=["bias", "prompt", "stop", "unknown"])
def test_of_many_wrong_members_the_first_is_the_error(change: dict) -> None:
    with pytest.raises(ValidationError) as refused:
        CompletionRequest(**{**BASE, **change})
    # One for each form that a value may have.
    assert refused.value.error_count() <= 2


def test_a_text_is_checked_in_about_the_time_of_writing_it() -> None:
    """All of a body's are, while no other request is answered."""
    texts = ["x"] * 20_000
    begin_s = time.thread_time()
    for text in texts:
        json.dumps(text)
    between_s = time.thread_time()
    for text in texts:
        writable(text)
    assert time.thread_time() - between_s < 40 * (between_s - begin_s)
