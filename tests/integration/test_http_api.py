"""What the endpoints say: answers and streams, echo, usage, token ids, reports, tokenizer, models, the
schema itself."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import httpx
import openai
import pytest
import torch
from openai.types import Completion
from openai.types.chat import ChatCompletion

from draftsmith.drafters.target.target import Target
from draftsmith.drafters.text.suffix import Suffix
from draftsmith.serve.config import EngineConfig
from tests.waiting import wait_until

GREEDY = {"temperature": 0, "max_tokens": 12, "ignore_eos": True}
PROMPT = "def draft(self, tokens):\n    return"
CHAT = [{"role": "user", "content": "print the names"}]


@pytest.fixture(scope="module")
def server(target: Target, live_server: Callable) -> Any:
    return live_server(target, Suffix(), EngineConfig(k=3, max_batch=4))


def test_openai_client_completes_and_streams_the_same(
    client: openai.OpenAI, target: Target
) -> None:
    asked: Any = {"model": "tiny", "prompt": PROMPT, "temperature": 0, "max_tokens": 12}
    asked |= {"extra_body": {"ignore_eos": True}}
    whole = client.completions.create(**asked)
    usage = {"stream_options": {"include_usage": True}}
    chunks = list(client.completions.create(**asked, **usage, stream=True))
    ids = target.tokenizer()(PROMPT)["input_ids"]
    (answer,) = target.answer([ids], max_new_tokens=12, ignore_eos=True)
    expected = target.tokenizer().decode(answer)
    assert whole.choices[0].text == expected
    assert "".join(chunk.choices[0].text for chunk in chunks if chunk.choices) == expected
    assert whole.choices[0].finish_reason == "length"
    assert [c.choices[0].finish_reason for c in chunks if c.choices][-1] == "length"
    for usage in (whole.usage, chunks[-1].usage):
        assert usage.prompt_tokens == len(ids) and usage.completion_tokens == 12
        assert usage.total_tokens == len(ids) + 12


def test_openai_client_chats_and_streams_the_same(client: openai.OpenAI) -> None:
    options: Any = {"model": "tiny", "messages": CHAT, "temperature": 0, "max_completion_tokens": 9}
    whole = client.chat.completions.create(**options)
    chunks = list(client.chat.completions.create(**options, stream=True))
    assert chunks[0].choices[0].delta.role == "assistant"
    streamed = "".join(chunk.choices[0].delta.content or "" for chunk in chunks)
    assert streamed == whole.choices[0].message.content
    assert whole.choices[0].message.role == "assistant" and whole.object == "chat.completion"
    assert chunks[-1].choices[0].finish_reason == whole.choices[0].finish_reason


def test_several_prompts_and_choices_come_in_order(server: Any) -> None:
    prompts = ["import os", PROMPT]
    options = {"seed": 5, "temperature": 0.8, "max_tokens": 8, "return_token_ids": True}
    together = server.complete(prompts, n=2, **options).json()
    assert [choice["index"] for choice in together["choices"]] == [0, 1, 2, 3]
    found = [choice["token_ids"] for choice in together["choices"]]
    assert found[::2] == [server.choice(prompt, **options)["token_ids"] for prompt in prompts]
    assert found[0] != found[1]
    assert together["usage"]["completion_tokens"] == sum(map(len, found))


def test_logprobs_of_both_endpoints(client: openai.OpenAI) -> None:
    text = client.completions.create(
        model="tiny", prompt=PROMPT, max_tokens=5, logprobs=2, temperature=0
    )
    told = text.choices[0].logprobs
    assert len(told.tokens) == len(told.token_logprobs) == len(told.top_logprobs) == 5
    # Greedy takes the likeliest token, so nothing in the list beats it.
    assert [max(top.values()) for top in told.top_logprobs] == told.token_logprobs
    chat = client.chat.completions.create(
        model="tiny", messages=CHAT, max_tokens=4, logprobs=True, top_logprobs=3
    )
    content = chat.choices[0].logprobs.content
    assert len(content) == chat.usage.completion_tokens
    assert all(len(entry.top_logprobs) == 3 for entry in content)


def test_a_stop_string_is_not_part_of_the_answer(server: Any) -> None:
    whole = server.choice(PROMPT, **GREEDY)["text"]
    stop = next(c for c in whole[2:] if c.isascii() and c.isprintable())
    choice = server.choice(PROMPT, **GREEDY, stop=[stop])
    assert choice["finish_reason"] == "stop" and choice["text"] == whole[: whole.index(stop)]
    events = server.events("/v1/completions", prompt=PROMPT, **GREEDY, stop=stop)
    streamed = "".join(event["choices"][0]["text"] for event in events)
    assert streamed == choice["text"]


def test_a_tokenizer_without_chat_template_refuses_chat(
    target_folder: str, live_server: Callable
) -> None:
    target = Target.load(target_folder)
    target.tokenizer().chat_template = None
    server = live_server(target, None, EngineConfig())
    assert "chat template" in server.chat(CHAT)["error"]["message"]


@pytest.mark.parametrize("stream", [True, False])
def test_a_client_that_leaves_cancels_its_request(
    stream: bool, target: Target, live_server: Callable
) -> None:
    server = live_server(target, None, EngineConfig(max_batch=1)).slow(0.05)
    stats = server.engine.stats
    body = {"model": "tiny", "prompt": "x", "max_tokens": 200, "ignore_eos": True, "stream": stream}
    with (
        httpx.Client(base_url=server.url, timeout=0.7) as client,
        pytest.raises(httpx.TimeoutException),
    ):
        if stream:
            with client.stream("POST", "/v1/completions", json=body) as response:
                for count, _ in enumerate(response.iter_lines()):
                    if count == 3:
                        raise httpx.ReadTimeout("the reader has had enough")
        else:
            client.post("/v1/completions", json=body)
    wait_until(lambda: stats.finished["abort"] == 1)
    assert not server.engine.scheduler.busy
    assert server.engine.scheduler.blocks.num_free == server.engine.scheduler.blocks.num_usable


def test_echo_puts_the_prompt_before_the_answer(server: Any, target: Target) -> None:
    plain = server.choice(PROMPT, **GREEDY)["text"]
    echoed = server.complete([PROMPT, "import os"], **GREEDY, echo=True, n=2).json()
    assert [c["text"] for c in echoed["choices"][:2]] == [PROMPT + plain] * 2
    assert all(c["text"].startswith("import os") for c in echoed["choices"][2:])
    ids = target.tokenizer()(PROMPT)["input_ids"]
    assert server.choice(ids, **GREEDY, echo=True)["text"] == PROMPT + plain
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
    asked = {**GREEDY, "echo": True, "logprobs": 1}
    for most in (0, 1, 12):
        told = server.choice(PROMPT, **asked | {"max_tokens": most})["logprobs"]
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
        assert "".join(told["tokens"][: len(ids)]) == PROMPT
        assert told["text_offset"][1] == len(told["tokens"][0])
    chunks = server.events("/v1/completions", prompt=PROMPT, **asked)
    joined = [value for one in chunks for value in one["choices"][0]["logprobs"]["token_logprobs"]]
    assert joined[1:] == pytest.approx(told["token_logprobs"][1:], abs=1e-4)


def test_echo_of_the_prompt_alone(server: Any) -> None:
    body = server.complete(
        PROMPT, **{**GREEDY, "max_tokens": 0}, echo=True, return_token_ids=True
    ).json()
    choice = body["choices"][0]
    assert choice["text"] == PROMPT and choice["token_ids"] == []
    assert choice["finish_reason"] == "length"
    assert body["usage"]["completion_tokens"] == 0
    assert body["usage"]["prompt_tokens"] == len(choice["prompt_token_ids"])
    streamed = server.events("/v1/completions", prompt=PROMPT, echo=True, max_tokens=0)
    assert "".join(chunk["choices"][0]["text"] for chunk in streamed) == PROMPT


def test_a_prompt_may_fill_the_context_where_it_is_all(
    target: Target, live_server: Callable
) -> None:
    # The pool holds the context and nothing more.
    config = EngineConfig(k=3, max_batch=1, max_length=64, block_size=16)
    server = live_server(target, Suffix(), config)
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
    server = live_server(target, Suffix(), config)
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
        ("/v1/completions", {"prompt": "x", "max_tokens": 3}),
        ("/v1/chat/completions", {"messages": CHAT, "max_tokens": 3}),
        ("/v1/responses", {"input": "x", "max_output_tokens": 3}),
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
    options = {"include_usage": True}
    without = server.events("/v1/completions", prompt=PROMPT, **GREEDY, stream_options=options)
    assert all(chunk["usage"] is None for chunk in without[:-1])
    assert without[-1]["usage"]["total_tokens"] == chunks[-1]["usage"]["total_tokens"]
    chunks = server.events("/v1/completions", prompt=PROMPT, **GREEDY)
    assert not any("usage" in chunk for chunk in chunks)


def test_usage_tells_what_the_cache_held_which_a_salt_keeps_apart(
    target: Target, live_server: Callable
) -> None:
    server = live_server(target, None, EngineConfig(block_size=4))

    def cached(**options: object) -> int:
        usage = server.complete(list(range(3, 33)), max_tokens=1, **options).json()["usage"]
        return usage["prompt_tokens_details"]["cached_tokens"]

    assert cached(n=2) < cached(n=2) == 28
    assert server.metric("vllm:prefix_cache_hits_total") >= 28
    assert server.metric("vllm:prefix_cache_queries_total") == 120
    salts = ({"cache_salt": "a"}, {"cache_salt": "a"}, {"cache_salt": "b", "priority": 3})
    assert [cached(**salt) for salt in salts] == [0, 28, 0]


def test_prompt_logprobs_in_vllms_layout(server: Any, target: Target) -> None:
    ids = target.tokenizer()(PROMPT)["input_ids"]
    with torch.inference_mode():
        _, hidden = target.states(torch.tensor([ids]), torch.ones(1, len(ids)), ())
        logprobs = torch.log_softmax(target.head(hidden[0, :-1]).float(), dim=-1)
    body = {**GREEDY, "max_tokens": 1, "echo": True, "logprobs": 1, "prompt_logprobs": 3}
    choice = server.choice(PROMPT, **body)
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
    told = server.told("/v1/chat/completions", **chat)
    assert len(told["prompt_logprobs"]) == told["usage"]["prompt_tokens"]
    ChatCompletion.model_validate(told, strict=True)


def test_a_prompt_is_cut_to_its_last_tokens(server: Any, target: Target) -> None:
    ids = target.tokenizer()(PROMPT)["input_ids"]
    options = {**GREEDY, "return_token_ids": True}
    cut = server.choice(PROMPT, **options, truncate_prompt_tokens=5, echo=True)
    own = server.choice(ids[-5:], **options)
    assert cut["prompt_token_ids"] == ids[-5:] and cut["token_ids"] == own["token_ids"]
    assert cut["text"].startswith(target.tokenizer().decode(ids[-5:]))
    long = server.complete([*range(3, 253)] * 2, **options, truncate_prompt_tokens=-1).json()
    assert long["usage"]["prompt_tokens"] == 256 - 12


def test_text_with_its_stop_string_and_its_special_tokens(server: Any, target: Target) -> None:
    text = server.choice(PROMPT, **GREEDY)["text"]
    stop = {**GREEDY, "stop": text[4:6]}
    cut = server.choice(PROMPT, **stop, include_stop_str_in_output=True)
    whole = text[: text.index(text[4:6])]
    assert cut["text"] == whole + text[4:6] and cut["finish_reason"] == "stop"
    eos = {"max_tokens": 3, "allowed_token_ids": [0], "ignore_eos": True, "logit_bias": {"0": 9}}
    shown = server.choice(PROMPT, **eos, skip_special_tokens=False)["text"]
    assert shown == 3 * target.tokenizer().eos_token
    assert server.choice(PROMPT, **eos)["text"] == ""


def test_a_chunk_holds_all_tokens_of_a_round(server: Any) -> None:
    body = {**GREEDY, "max_tokens": 40, "prompt": [7, 8, 9] * 5, "return_token_ids": True}
    chunks = server.events("/v1/completions", **body)
    sizes = [len(chunk["choices"][0]["token_ids"]) for chunk in chunks]
    assert sum(sizes) == 40 and max(sizes) > 1, "suffixes of a repetitive text are accepted"


@pytest.mark.parametrize(
    "path, prompt",
    [("/v1/completions", {"prompt": PROMPT}), ("/v1/chat/completions", {"messages": CHAT})],
)
def test_token_ids_of_prompt_and_answer(
    path: str, prompt: dict, server: Any, target: Target
) -> None:
    body = server.told(path, **prompt, **GREEDY, return_token_ids=True)
    choice = body["choices"][0]
    ids = choice["prompt_token_ids"] if path == "/v1/completions" else body["prompt_token_ids"]
    assert len(ids) == body["usage"]["prompt_tokens"] and len(choice["token_ids"]) == 12
    text = choice["text"] if path == "/v1/completions" else choice["message"]["content"]
    assert target.tokenizer().decode(choice["token_ids"]) == text
    chunks = server.events(path, **prompt, **GREEDY, return_token_ids=True)
    parts = [chunk["choices"][0] for chunk in chunks]
    told = [
        chunk.get("prompt_token_ids", part.get("prompt_token_ids"))
        for chunk, part in zip(chunks, parts)
    ]
    assert told[0] == ids and not any(told[1:])
    streamed = [token for part in parts for token in part.get("token_ids", ())]
    assert streamed == choice["token_ids"]


@pytest.mark.parametrize("level", ["none", "summary", "detailed"])
def test_the_server_reports_drafts_of_every_request_as_told(
    level: str, target: Target, live_server: Callable
) -> None:
    text = Suffix(max_cached_requests=0)  # an answer drafts for no later one
    server = live_server(target, text, EngineConfig(k=3), per_request_spec_decode_metrics=level)
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
    drafted = sum(int(length) * sum(group) for length, group in groups.items())
    assert drafted == report["num_draft_tokens"]
    for count, number in enumerate(report["acceptance_histogram"]):
        assert number == sum(group[count] for group in groups.values() if count < len(group))
    accepted = sum(count * number for count, number in enumerate(report["acceptance_histogram"]))
    assert accepted == report["num_accepted_draft_tokens"]
    mean = 1 + accepted / report["num_spec_steps"]
    assert report["mean_acceptance_length"] == pytest.approx(mean)
    # Of several choices none, and in a stream with the usage.
    several = server.complete(prompt, **options, n=2).json()["metrics"]
    assert several == {"speculative_decoding": None}
    body = {"prompt": prompt, **options}
    *chunks, last = server.events("/v1/completions", **body, stream_options={"include_usage": True})
    assert last["metrics"]["speculative_decoding"] == report
    chunks = [chunks[-1], *server.events("/v1/completions", **body)]
    assert not any("metrics" in chunk for chunk in chunks)


def test_tokenizer_endpoints(server: Any, target: Target) -> None:
    tokenizer = target.tokenizer()
    ids = tokenizer(PROMPT)["input_ids"]
    told = server.told("/tokenize", prompt=PROMPT, return_token_strs=True)
    assert told["tokens"] == ids and told["count"] == len(ids)
    assert told["max_model_len"] == server.engine.max_length
    assert told["token_strs"] == tokenizer.convert_ids_to_tokens(ids)
    assert server.told("/detokenize", tokens=ids) == {"prompt": PROMPT}
    chat = tokenizer.apply_chat_template(CHAT, add_generation_prompt=True, return_dict=False)
    assert server.told("/tokenize", messages=CHAT)["tokens"] == chat
    info = server.http.get("/tokenizer_info").json()
    assert info["eos_token"] == "<|endoftext|>" and info["chat_template"] == tokenizer.chat_template


def test_service_endpoints(server: Any, client: openai.OpenAI) -> None:
    assert server.http.get("/version").json()["version"]
    model = client.models.retrieve("tiny")
    assert model.id == "tiny" and model.created > 0
    assert model.model_extra["max_model_len"] == server.engine.max_length
    with pytest.raises(openai.NotFoundError):
        client.models.retrieve("org/other")


def test_a_final_message_is_continued(server: Any, target: Target) -> None:
    messages = [*CHAT, {"role": "assistant", "content": "for name in"}]
    body = {"messages": messages, "continue_final_message": True}
    told = server.told("/tokenize", **body)["tokens"]
    assert target.tokenizer().decode(told).endswith("<assistant>for name in")
    assert server.told("/v1/chat/completions", **body, **GREEDY)["choices"]


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
    body = {"messages": CHAT, "seed": 1, "temperature": 0.7, "max_tokens": 120, **form}
    choice = server.told("/v1/chat/completions", **body)["choices"][0]
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
        return server.choice(ids, **{**options, **change})["token_ids"]

    plain = tokens()
    assert tokens(logit_bias={"65": 100}) == [65] * 12
    assert set(tokens(allowed_token_ids=[70, 71])) <= {70, 71}
    assert plain[0] not in tokens(logit_bias={str(plain[0]): -100})
    assert len(set(tokens(presence_penalty=2, frequency_penalty=2, repetition_penalty=50.0))) == 12
    letters = vocabulary("a b c")["input_ids"]
    banned = server.choice(ids, **GREEDY, bad_words=["a"], allowed_token_ids=letters)["text"]
    assert set(banned) <= set("bc ") and set(banned) & set("bc")
    assert len(tokens(ignore_eos=False, stop_token_ids=[plain[2]], min_tokens=12)) == 12
    assert tokens(ignore_eos=False, stop_token_ids=[plain[2]])[-1] == plain[2]


def test_the_schema_documents_what_comes(server: Any, client: openai.OpenAI) -> None:
    schema = client.get("/../openapi.json", cast_to=object)
    paths = schema["paths"]
    statuses = {"200", "400", "401", "404", "408", "413", "429", "500", "503"}
    for path in ("/v1/completions", "/v1/chat/completions"):
        assert set(paths[path]["post"]["responses"]) == statuses
    for methods in paths.values():
        for operation in methods.values():
            assert "422" not in operation["responses"]
            assert {"200", "204"} & set(operation["responses"])
    assert "HTTPValidationError" not in schema["components"]["schemas"]
    report = {"report": True}
    for more in ({"logprobs": 2, "n": 2, "return_token_ids": True}, {}):
        body = server.complete(PROMPT, **GREEDY, speculation=report, **more).json()
        Completion.model_validate(body, strict=True)
    more = {"logprobs": True, "top_logprobs": 2, "return_token_ids": True}
    chat = server.told("/v1/chat/completions", messages=CHAT, **GREEDY, **more)
    ChatCompletion.model_validate(chat, strict=True)
