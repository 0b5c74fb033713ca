"""What the endpoints say beyond a plain answer: echo, usage, token ids, reports, tokenizer, models,
the schema itself."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import openai
import pytest
import torch

from draftsmith.drafters.target.target import Target
from draftsmith.drafters.text.ngram import Ngram
from draftsmith.serve.config import EngineConfig
from draftsmith.serve.http.schema import ChatBody, CompletionBody

GREEDY = {"temperature": 0, "max_tokens": 12, "ignore_eos": True}
PROMPT = "def draft(self, tokens):\n    return"
CHAT = [{"role": "user", "content": "print the names"}]


@pytest.fixture(scope="module")
def server(target: Target, live_server: Callable) -> Any:
    return live_server(target, Ngram(min_n=1, max_n=3), EngineConfig(k=3, max_batch=4))


def test_echo_puts_the_prompt_before_the_answer(server: Any, target: Target) -> None:
    plain = server.complete(PROMPT, **GREEDY).json()["choices"][0]["text"]
    echoed = server.complete([PROMPT, "import os"], **GREEDY, echo=True, n=2).json()
    assert [c["text"] for c in echoed["choices"][:2]] == [PROMPT + plain] * 2
    assert all(c["text"].startswith("import os") for c in echoed["choices"][2:])
    ids = target.tokenizer()(PROMPT)["input_ids"]
    assert server.complete(ids, **GREEDY, echo=True).json()["choices"][0]["text"] == PROMPT + plain
    streamed = server.events("/v1/completions", prompt=PROMPT, **GREEDY, echo=True)
    assert "".join(chunk["choices"][0]["text"] for chunk in streamed) == PROMPT + plain


def test_line_ends_of_unicode_do_not_cut_events(server: Any) -> None:
    prompt = "one\x85two\u2028three\u2029four"
    streamed = server.events("/v1/completions", prompt=prompt, **GREEDY, echo=True)
    assert "".join(chunk["choices"][0]["text"] for chunk in streamed).startswith(prompt)


def test_echo_with_logprobs_judges_the_prompt(server: Any, target: Target) -> None:
    ids = target.tokenizer()(PROMPT)["input_ids"]
    with torch.inference_mode():
        _, hidden = target.states(torch.tensor([ids]), torch.ones(1, len(ids)), ())
        distribution = torch.log_softmax(target.head(hidden[0, :-1]).float(), dim=-1)
    own = distribution.gather(1, torch.tensor(ids[1:])[:, None])[:, 0].tolist()
    bodies = [
        server.complete(PROMPT, **{**GREEDY, "max_tokens": most}, echo=True, logprobs=1).json()
        for most in (0, 1, 12)
    ]
    for body, most in zip(bodies, (0, 1, 12)):
        told = body["choices"][0]["logprobs"]
        assert all(
            len(told[key]) == len(ids) + most
            for key in ("tokens", "token_logprobs", "top_logprobs", "text_offset")
        )
        assert told["token_logprobs"][0] is None and told["top_logprobs"][0] is None
        assert told["token_logprobs"][1 : len(ids)] == pytest.approx(own, abs=1e-4)
        tops = told["top_logprobs"][1 : len(ids)]
        assert [max(top.values()) for top in tops] == pytest.approx(
            distribution.max(dim=-1).values.tolist(), abs=1e-4
        )
        assert "".join(told["tokens"][: len(ids)]) == PROMPT and told["text_offset"][1] == len(
            told["tokens"][0]
        )
    chunks = server.events("/v1/completions", prompt=PROMPT, **GREEDY, echo=True, logprobs=1)
    joined = [
        value for chunk in chunks for value in chunk["choices"][0]["logprobs"]["token_logprobs"]
    ]
    assert joined[1:] == pytest.approx(
        bodies[2]["choices"][0]["logprobs"]["token_logprobs"][1:], abs=1e-4
    )


def test_echo_of_the_prompt_alone(server: Any) -> None:
    body = server.complete(
        PROMPT, **{**GREEDY, "max_tokens": 0}, echo=True, return_token_ids=True
    ).json()
    choice = body["choices"][0]
    assert (
        choice["text"] == PROMPT
        and choice["token_ids"] == []
        and choice["finish_reason"] == "length"
    )
    assert body["usage"]["completion_tokens"] == 0 and body["usage"]["prompt_tokens"] == len(
        choice["prompt_token_ids"]
    )
    streamed = server.events("/v1/completions", prompt=PROMPT, echo=True, max_tokens=0)
    assert "".join(chunk["choices"][0]["text"] for chunk in streamed) == PROMPT


def test_a_prompt_may_fill_the_context_where_it_is_all(
    target: Target, live_server: Callable
) -> None:
    # The pool holds the context and nothing more.
    config = EngineConfig(k=3, max_batch=1, max_length=64, block_size=16)
    server = live_server(target, Ngram(min_n=1, max_n=3), config)
    tokens = [number % 200 + 5 for number in range(64)]
    body = server.complete(tokens, max_tokens=0, echo=True, logprobs=1).json()
    assert len(body["choices"][0]["logprobs"]["tokens"]) == 64
    assert body["usage"]["total_tokens"] == 64
    refused = server.complete([*tokens, 5], max_tokens=0, echo=True).json()["error"]
    assert refused["param"] == "prompt"
    assert server.complete(tokens, max_tokens=1).status_code == 400


def test_an_answer_without_a_number_takes_what_room_there_is(
    target: Target, live_server: Callable
) -> None:
    config = EngineConfig(k=3, max_batch=2, max_length=64)
    server = live_server(target, Ngram(min_n=1, max_n=3), config)
    prompts = [[7] * 60, [7] * 20]
    body = server.complete(prompts, ignore_eos=True, return_token_ids=True).json()
    assert [len(choice["token_ids"]) for choice in body["choices"]] == [4, 16]
    least = server.complete([7] * 20, min_tokens=20, return_token_ids=True).json()
    assert len(least["choices"][0]["token_ids"]) == 20
    # A number that a client gives is never made smaller.
    assert server.complete([7] * 60, min_tokens=20).json()["error"]["param"] == "min_tokens"
    assert server.complete([7] * 60, max_tokens=5).json()["error"]["param"] == "max_tokens"


def test_obfuscation_of_streams_is_off_and_stays_off(server: Any) -> None:
    for path, body in (
        ("/v1/completions", {"prompt": "x"}),
        ("/v1/chat/completions", {"messages": CHAT}),
        ("/v1/responses", {"input": "x"}),
    ):
        for asked, status in ((False, 200), (None, 200), (True, 400)):
            options = {"stream": True, "stream_options": {"include_obfuscation": asked}}
            response = server.http.post(path, json=body | options)
            assert response.status_code == status and 'obfuscation":' not in response.text


def test_usage_of_a_stream(server: Any) -> None:
    options = {"include_usage": True, "continuous_usage_stats": True}
    chunks = server.events(
        "/v1/completions", prompt=PROMPT, **GREEDY, stream_options=options, return_token_ids=True
    )
    counted = 0
    for chunk in chunks[:-1]:
        counted += len(chunk["choices"][0]["token_ids"])
        assert chunk["usage"]["completion_tokens"] == counted
    assert chunks[-1]["choices"] == [] and chunks[-1]["usage"]["completion_tokens"] == 12 == counted
    without = server.events(
        "/v1/completions", prompt=PROMPT, **GREEDY, stream_options={"include_usage": True}
    )
    assert (
        all(chunk["usage"] is None for chunk in without[:-1])
        and without[-1]["usage"]["total_tokens"] == chunks[-1]["usage"]["total_tokens"]
    )
    assert all(
        "usage" not in chunk for chunk in server.events("/v1/completions", prompt=PROMPT, **GREEDY)
    )


def test_usage_tells_what_the_prefix_cache_held(target: Target, live_server: Callable) -> None:
    server = live_server(target, None, EngineConfig(block_size=4))
    prompt = [(5 * i) % 200 + 3 for i in range(30)]
    cached = [
        server.complete(prompt, max_tokens=1, n=2).json()["usage"]["prompt_tokens_details"][
            "cached_tokens"
        ]
        for _ in range(2)
    ]
    assert cached[0] < cached[1] == 28
    assert (
        server.metric("vllm:prefix_cache_hits_total") >= 28
        and server.metric("vllm:prefix_cache_queries_total") == 120
    )


def test_a_salt_keeps_the_cache_apart(target: Target, live_server: Callable) -> None:
    server = live_server(target, None, EngineConfig(block_size=4))
    prompt, cached = list(range(3, 33)), []
    for salt in ({}, {"cache_salt": "a"}, {"cache_salt": "a"}, {"cache_salt": "b", "priority": 3}):
        usage = server.complete(prompt, max_tokens=1, **salt).json()["usage"]
        cached.append(usage["prompt_tokens_details"]["cached_tokens"])
    assert cached == [0, 0, 28, 0]


def test_prompt_logprobs_in_vllms_layout(server: Any, target: Target) -> None:
    ids = target.tokenizer()(PROMPT)["input_ids"]
    with torch.inference_mode():
        _, hidden = target.states(torch.tensor([ids]), torch.ones(1, len(ids)), ())
        logprobs = torch.log_softmax(target.head(hidden[0, :-1]).float(), dim=-1)
    body = {**GREEDY, "max_tokens": 1, "echo": True, "logprobs": 1, "prompt_logprobs": 3}
    choice = server.complete(PROMPT, **body).json()["choices"][0]
    first, *entries = choice["prompt_logprobs"]
    assert first is None and len(entries) == len(ids) - 1
    for entry, token, row in zip(entries, ids[1:], logprobs):
        assert set(entry) == {str(token), *map(str, row.topk(3).indices.tolist())}
        for key, told in entry.items():
            assert told["logprob"] == pytest.approx(row[int(key)].item(), abs=1e-4)
            assert told["rank"] == int((row > row[int(key)]).sum()) + 1
            assert told["decoded_token"] == target.tokenizer().decode([int(key)])
    assert all(len(top) <= 2 for top in choice["logprobs"]["top_logprobs"][1:])
    chat = {"messages": CHAT, **GREEDY, "max_tokens": 1, "prompt_logprobs": 0}
    told = server.http.post("/v1/chat/completions", json=chat).json()
    assert len(told["prompt_logprobs"]) == told["usage"]["prompt_tokens"]
    ChatBody.model_validate(told, strict=True)


def test_a_prompt_is_cut_to_its_last_tokens(server: Any, target: Target) -> None:
    ids = target.tokenizer()(PROMPT)["input_ids"]
    options = {**GREEDY, "return_token_ids": True}
    cut, own = (
        server.complete(prompt, **options, **change).json()["choices"][0]
        for prompt, change in (
            (PROMPT, {"truncate_prompt_tokens": 5, "echo": True}),
            (ids[-5:], {}),
        )
    )
    assert cut["prompt_token_ids"] == ids[-5:] and cut["token_ids"] == own["token_ids"]
    assert cut["text"].startswith(target.tokenizer().decode(ids[-5:]))
    long = server.complete([*range(3, 253)] * 2, **options, truncate_prompt_tokens=-1).json()
    assert long["usage"]["prompt_tokens"] == 256 - 12


def test_text_with_its_stop_string_and_its_special_tokens(server: Any, target: Target) -> None:
    text = server.complete(PROMPT, **GREEDY).json()["choices"][0]["text"]
    stop = {**GREEDY, "stop": text[4:6]}
    cut = server.complete(PROMPT, **stop, include_stop_str_in_output=True).json()["choices"][0]
    whole = text[: text.index(text[4:6])]
    assert cut["text"] == whole + text[4:6] and cut["finish_reason"] == "stop"
    eos = {"max_tokens": 3, "allowed_token_ids": [0], "ignore_eos": True, "logit_bias": {"0": 9}}
    shown = server.complete(PROMPT, **eos, skip_special_tokens=False).json()["choices"][0]["text"]
    assert shown == 3 * target.tokenizer().eos_token
    assert server.complete(PROMPT, **eos).json()["choices"][0]["text"] == ""


def test_a_chunk_holds_all_tokens_of_a_round(server: Any) -> None:
    chunks = server.events(
        "/v1/completions",
        prompt=[7, 8, 9] * 5,
        **{**GREEDY, "max_tokens": 40},
        return_token_ids=True,
    )
    sizes = [len(chunk["choices"][0]["token_ids"]) for chunk in chunks]
    assert sum(sizes) == 40 and max(sizes) > 1, "n-grams of a repetitive text are accepted"


@pytest.mark.parametrize(
    "path, prompt",
    [("/v1/completions", {"prompt": PROMPT}), ("/v1/chat/completions", {"messages": CHAT})],
)
def test_token_ids_of_prompt_and_answer(
    path: str, prompt: dict, server: Any, target: Target
) -> None:
    body = server.http.post(
        path, json={"model": "tiny", **prompt, **GREEDY, "return_token_ids": True}
    ).json()
    choice = body["choices"][0]
    ids = choice["prompt_token_ids"] if path == "/v1/completions" else body["prompt_token_ids"]
    assert len(ids) == body["usage"]["prompt_tokens"] and len(choice["token_ids"]) == 12
    text = choice["text"] if path == "/v1/completions" else choice["message"]["content"]
    assert target.tokenizer().decode(choice["token_ids"]) == text
    chunks = server.events(path, **prompt, **GREEDY, return_token_ids=True)
    told = [
        chunk.get("prompt_token_ids", chunk["choices"][0].get("prompt_token_ids"))
        for chunk in chunks
    ]
    assert told[0] == ids and not any(told[1:])
    assert [
        token for chunk in chunks for token in chunk["choices"][0].get("token_ids", [])
    ] == choice["token_ids"]


@pytest.mark.parametrize("level", ["none", "summary", "detailed"])
def test_the_server_reports_drafts_of_every_request_as_told(
    level: str, target: Target, live_server: Callable
) -> None:
    server = live_server(
        target, Ngram(min_n=1, max_n=3), EngineConfig(k=3), per_request_spec_decode_metrics=level
    )
    prompt, options = [7, 8, 9] * 5, {**GREEDY, "max_tokens": 30}
    body = server.complete(prompt, **options).json()
    if level == "none":
        assert "metrics" not in body
        return
    report = body["metrics"]["speculative_decoding"]
    assert ("per_step_accepted" in report) == (level == "detailed")
    assert report["num_spec_steps"] == sum(report["acceptance_histogram"]) > 0
    groups = report["acceptance_histogram_by_draft_length"]
    assert all(len(group) == int(length) + 1 for length, group in groups.items())
    assert (
        sum(int(length) * sum(group) for length, group in groups.items())
        == report["num_draft_tokens"]
    )
    for count, number in enumerate(report["acceptance_histogram"]):
        assert number == sum(group[count] for group in groups.values() if count < len(group))
    accepted = sum(count * number for count, number in enumerate(report["acceptance_histogram"]))
    assert accepted == report["num_accepted_draft_tokens"]
    assert report["mean_acceptance_length"] == pytest.approx(
        1 + accepted / report["num_spec_steps"]
    )
    # Of several choices none, and in a stream with the usage.
    assert server.complete(prompt, **options, n=2).json()["metrics"] == {
        "speculative_decoding": None
    }
    chunks = server.events(
        "/v1/completions", prompt=prompt, **options, stream_options={"include_usage": True}
    )
    assert chunks[-1]["metrics"]["speculative_decoding"] == report and "metrics" not in chunks[-2]
    assert all(
        "metrics" not in chunk
        for chunk in server.events("/v1/completions", prompt=prompt, **options)
    )


def test_tokenizer_endpoints(server: Any, target: Target) -> None:
    tokenizer = target.tokenizer()
    ids = tokenizer(PROMPT)["input_ids"]
    told = server.http.post("/tokenize", json={"prompt": PROMPT, "return_token_strs": True}).json()
    assert (
        told["tokens"] == ids
        and told["count"] == len(ids)
        and told["max_model_len"] == server.engine.max_length
    )
    assert told["token_strs"] == tokenizer.convert_ids_to_tokens(ids)
    assert server.http.post("/detokenize", json={"model": "tiny", "tokens": ids}).json() == {
        "prompt": PROMPT
    }
    chat = server.http.post("/tokenize", json={"messages": CHAT}).json()["tokens"]
    assert chat == tokenizer.apply_chat_template(
        CHAT, add_generation_prompt=True, return_dict=False
    )
    info = server.http.get("/tokenizer_info").json()
    assert info["eos_token"] == "<|endoftext|>" and info["chat_template"] == tokenizer.chat_template


@pytest.mark.parametrize("path, body, param", [
    ("/tokenize", {"prompt": 3}, "prompt"),
    ("/tokenize", {"messages": []}, "messages"),
    ("/tokenize", {"prompt": "x", "flavour": 1}, "flavour"),
    ("/tokenize", {}, "prompt"),
    ("/detokenize", {"tokens": [99999]}, "tokens"),
    ("/detokenize", {"tokens": [-1]}, "tokens"),
    ("/detokenize", {"tokens": "x"}, "tokens"),
])  # fmt: skip
def test_tokenizer_endpoints_refuse(path: str, body: dict, param: str, server: Any) -> None:
    response = server.http.post(path, json=body)
    assert response.status_code == 400 and response.json()["error"]["param"] == param


def test_tokenizer_endpoints_know_their_model(server: Any) -> None:
    assert server.http.post("/tokenize", json={"model": "other", "prompt": "x"}).status_code == 404


def test_service_endpoints(server: Any, client: openai.OpenAI) -> None:
    assert server.http.get("/version").json()["version"]
    for response in (server.http.get("/health"), server.http.get("/ping")):
        assert response.status_code == 200
    model = client.models.retrieve("tiny")
    assert (
        model.id == "tiny"
        and model.created > 0
        and model.model_extra["max_model_len"] == server.engine.max_length
    )
    with pytest.raises(openai.NotFoundError):
        client.models.retrieve("org/other")


def test_a_final_message_is_continued(server: Any, target: Target) -> None:
    messages = [*CHAT, {"role": "assistant", "content": "for name in"}]
    body = {"messages": messages, "continue_final_message": True}
    told = server.http.post("/tokenize", json=body).json()["tokens"]
    assert target.tokenizer().decode(told).endswith("<assistant>for name in")
    assert (
        server.http.post(
            "/v1/chat/completions", json={"model": "tiny", **body, **GREEDY}
        ).status_code
        == 200
    )


def test_variables_of_the_chat_template(
    tiny_target: Callable[..., str], live_server: Callable
) -> None:
    target = Target.load(tiny_target("llama"))
    target.tokenizer().chat_template = (
        "{% if enable_thinking %}think {% endif %}{{ messages[0]['content'] }}"
    )
    server = live_server(target, None, EngineConfig())
    for variables, text in ({}, "x"), ({"enable_thinking": True}, "think x"):
        body = {"messages": [{"role": "user", "content": "x"}], "chat_template_kwargs": variables}
        told = server.http.post("/tokenize", json=body).json()["tokens"]
        assert target.tokenizer().decode(told) == text


@pytest.mark.parametrize("form, good", [
    ({"response_format": {"type": "json_object"}}, lambda text: isinstance(json.loads(text), dict)),
    (
        {"response_format": {"type": "json_schema", "json_schema": {"name": "x", "schema": {"enum": [12, 34]}}}},
        lambda text: json.loads(text) in (12, 34),
    ),
    ({"structured_outputs": {"choice": ["yes", "no"]}}, lambda text: text in ("yes", "no")),
    ({"structured_outputs": {"regex": "[ab]{3}c"}}, lambda text: len(text) == 4 and text[-1] == "c"),
    ({"structured_outputs": {"json": '{"const": "x"}'}}, lambda text: json.loads(text) == "x"),
    ({"structured_outputs": {"grammar": 'start: "x" "y"'}}, lambda text: text == "xy"),
])  # fmt: skip
def test_answers_have_the_form_asked_for(
    form: dict, good: Callable[[str], bool], server: Any
) -> None:
    body = {
        "model": "tiny",
        "messages": CHAT,
        "seed": 1,
        "temperature": 0.7,
        "max_tokens": 120,
        **form,
    }
    choice = server.http.post("/v1/chat/completions", json=body).json()["choices"][0]
    # A random model may go on within a JSON string until its tokens are spent, which is no fault of
    # the form.
    if choice["finish_reason"] == "stop":
        assert good(choice["message"]["content"])
    assert choice["finish_reason"] == "stop" or "json_object" in str(form)


@pytest.mark.parametrize("stream", [False, True])
def test_bans_that_leave_no_token_are_the_requests_fault(
    stream: bool, server: Any, target: Target
) -> None:
    letter = target.tokenizer()("a")["input_ids"][0]
    body = {"structured_outputs": {"regex": "b+"}, "allowed_token_ids": [letter], "max_tokens": 5}
    if stream:
        error = server.events("/v1/completions", prompt=PROMPT, **body)[-1]["error"]
    else:
        response = server.complete(PROMPT, **body)
        assert response.status_code == 400
        error = response.json()["error"]
    assert error["type"] == "invalid_request_error" and "leaves no token" in error["message"]
    assert server.complete(PROMPT, max_tokens=1).status_code == 200


def test_what_shapes_the_distribution_reaches_it(server: Any, target: Target) -> None:
    vocabulary = target.tokenizer()
    ids = vocabulary(PROMPT)["input_ids"]
    options = {**GREEDY, "return_token_ids": True}

    def tokens(**change: object) -> list[int]:
        return server.complete(ids, **{**options, **change}).json()["choices"][0]["token_ids"]

    plain = tokens()
    assert tokens(logit_bias={"65": 100}) == [65] * 12
    assert set(tokens(allowed_token_ids=[70, 71])) <= {70, 71}
    assert plain[0] not in tokens(logit_bias={str(plain[0]): -100})
    assert len(set(tokens(presence_penalty=2, frequency_penalty=2, repetition_penalty=50.0))) == 12
    letters = vocabulary("a b c")["input_ids"]
    banned = server.complete(ids, **GREEDY, bad_words=["a"], allowed_token_ids=letters).json()[
        "choices"
    ][0]["text"]
    assert set(banned) <= set("bc ") and set(banned) & set("bc")
    assert len(tokens(ignore_eos=False, stop_token_ids=[plain[2]], min_tokens=12)) == 12
    assert tokens(ignore_eos=False, stop_token_ids=[plain[2]])[-1] == plain[2]


def test_the_schema_documents_what_comes(server: Any, client: openai.OpenAI) -> None:
    schema = client.get("/../openapi.json", cast_to=object)
    paths = schema["paths"]
    for path in ("/v1/completions", "/v1/chat/completions"):
        assert set(paths[path]["post"]["responses"]) == {
            "200",
            "400",
            "401",
            "404",
            "408",
            "413",
            "429",
            "500",
            "503",
        }
    for methods in paths.values():
        for operation in methods.values():
            assert "422" not in operation["responses"] and {"200", "204"} & set(
                operation["responses"]
            )
    assert "HTTPValidationError" not in schema["components"]["schemas"]
    for body in (
        server.complete(
            PROMPT, **GREEDY, logprobs=2, n=2, return_token_ids=True, speculation={"report": True}
        ).json(),
        server.complete(PROMPT, **GREEDY, speculation={"report": True}).json(),
    ):
        CompletionBody.model_validate(body, strict=True)
    chat = {
        "model": "tiny",
        "messages": CHAT,
        **GREEDY,
        "logprobs": True,
        "top_logprobs": 2,
        "return_token_ids": True,
    }
    ChatBody.model_validate(server.http.post("/v1/chat/completions", json=chat).json(), strict=True)
