from __future__ import annotations

import asyncio
import dataclasses
import json
from pathlib import Path

import httpx
import pytest

from draftsmith.client import Scrape
from draftsmith.commands.arguments import collect, parse, parser_for
from draftsmith.config import build
from draftsmith.errors import UserError
from draftsmith.serve.bench import command
from draftsmith.serve.bench.client import Client, PassResult, TimedAnswer, read_prompts
from draftsmith.serve.bench.command import check, server_arguments
from draftsmith.serve.bench.config import BenchConfig, ServedPair
from draftsmith.serve.bench.report import BenchCase, acceptance, cost_of, figures, ratios, table
from draftsmith.serve.config import ServeConfig


def answer(
    num_tokens: int, ttft_s: float, tpot_s: float, report: dict | None = None
) -> TimedAnswer:
    last_s = ttft_s + tpot_s * (num_tokens - 1)
    return TimedAnswer(num_tokens=num_tokens, first_s=ttft_s, last_s=last_s, report=report)


def report(offered: list[int], accepted: list[int], committed: list[int]) -> dict:
    return {
        "per_step_drafted": offered,
        "per_step_accepted": accepted,
        "per_step_committed": committed,
    }


def case(mode: str, walls_s: list[float], report_: dict | None = None) -> BenchCase:
    answers = [answer(10, 0.1, 0.02, report_), answer(30, 0.3, 0.04, report_)]
    return BenchCase(0.0, mode, [PassResult(list(answers), wall_s) for wall_s in walls_s])


def test_figures_and_ratio_of_modes() -> None:
    off = figures(case("off", [4.0, 4.0]))
    on = figures(case("on", [2.0, 1.0], report([2, 2], [2, 0], [3, 1])))
    assert off["tokens_per_s"] == 10 and on["tokens_per_s"] == pytest.approx(80 / 3)
    assert off["ttft_ms"] == pytest.approx({"p50": 100.0, "p95": 300.0, "p99": 300.0})
    assert off["e2el_ms"]["p50"] == pytest.approx(280.0)
    assert off["tpot_ms"]["p50"] == pytest.approx(20.0) and off["acceptance"] is None
    assert on["acceptance"]["tau"] == 2.0 and on["acceptance"]["alpha"] == [0.5, 1.0]
    ratio = ratios([off, on])[0]
    assert (ratio["speedup"], ratio["lowest"], ratio["highest"]) == (pytest.approx(8 / 3), 2.0, 4.0)
    assert "speculation on / off = 2.67 (2.00 to 4.00 by pass)" in table([off, on])


def test_answers_of_one_token_have_no_time_between_tokens() -> None:
    one = figures(BenchCase(0.0, "off", [PassResult([answer(1, 0.1, 0.0)], 1.0)]))
    assert one["tpot_ms"]["p50"] is None and " 100.0 / 100.0             - / - " in table([one])


def test_a_server_that_lists_no_model_is_one_sentence() -> None:
    async def asked() -> str:
        client = Client("http://server", api_key=None, timeout_s=5)
        client.http = httpx.AsyncClient(
            base_url="http://server",
            transport=httpx.MockTransport(lambda request: httpx.Response(200, json={"data": None})),
        )
        return await client.model()

    with pytest.raises(UserError, match="does not answer /v1/models"):
        asyncio.run(asked())


def test_answers_without_drafts_do_not_count_towards_acceptance() -> None:
    assert acceptance([[report([], [], [])]]) is None
    found = acceptance([[report([], [], [])], [report([3], [1], [2])]])
    assert found["rounds"] == 1 and found["tau"] == 2.0


def test_built_in_prompts_depend_on_the_seed_alone() -> None:
    prompts = read_prompts("stdlib:code", count=5, chars=80, seed=3)
    assert prompts == read_prompts("stdlib:code", count=5, chars=80, seed=3)
    assert prompts != read_prompts("stdlib:code", count=5, chars=80, seed=4)
    assert all(len(prompt["prompt"]) == 80 for prompt in prompts)


def test_published_prompts_are_taken_from_their_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("DRAFTSMITH_SUITES", str(tmp_path))
    with pytest.raises(UserError, match=r"suite folder .* as published"):
        read_prompts("published:train", count=1, chars=1, seed=0)


def test_block_efficiency_and_the_memory_bound_speed_up() -> None:
    """Two rounds of 2 drafts keep 3 of 4: 2.5 tokens a round. A chain reads two tenths of the
    target twice, a block once."""
    rounds = report([2, 2], [2, 1], [3, 1])
    for told, read in (
        ({"proposal": 0, "token": 20}, 1.4),
        ({"proposal": 20, "token": 0}, 1.2),
        ({"proposal": 15, "token": 5}, 1.25),
    ):
        found = acceptance([[rounds]], draft_cost=cost_of({"target_pass": 100, **told}))
        assert found["block_efficiency"] == 2.5 and found["mbsu"] == pytest.approx(2.5 / read)
    assert (
        cost_of({"target_pass": 100}) is None
        and acceptance([[rounds]], draft_cost=None)["mbsu"] is None
    )


def streamed(*chunks: dict) -> PassResult:
    """One request to a server that answers with these events."""

    async def measure() -> PassResult:
        client = Client("http://server", api_key=None, timeout_s=5)
        events = [*(json.dumps(chunk, ensure_ascii=False) for chunk in chunks), "[DONE]"]
        stream = "".join(f"data: {event}\r\n\r\n" for event in events).encode()
        client.http = httpx.AsyncClient(
            base_url="http://server",
            transport=httpx.MockTransport(lambda request: httpx.Response(200, content=stream)),
        )
        return await client.measure([{"prompt": "x"}], {}, 1)

    return asyncio.run(measure())


def test_line_ends_of_unicode_within_a_text_do_not_end_an_event() -> None:
    """Other servers send them as they are."""
    chunk = {"choices": [{"text": "one\x85two\u2028three"}], "usage": {"completion_tokens": 3}}
    (answer,) = streamed(chunk).answers
    assert (answer.text, answer.num_tokens) == ("one\x85two\u2028three", 3)


def test_an_answer_that_ends_with_an_error_says_which() -> None:
    begun = {"choices": [{"text": "one"}]}
    failed = {
        "error": {"message": "out of memory", "type": "server_error", "param": None, "code": None}
    }
    with pytest.raises(UserError, match="broke an answer off: out of memory"):
        streamed(begun, failed)


def test_the_started_server_gets_the_pair_that_bench_got() -> None:
    given = {
        "target": "t",
        "draft": "d",
        "draft_revision": "v1",
        "draft_dtype": "bfloat16",
        "heterogeneous_vocab": True,
        "trust_remote_code": True,
        "suffix": True,
        "suffix_answers": "a",
    }
    defaults = {field.name: field.default for field in dataclasses.fields(ServedPair)}
    assert given.keys() == defaults.keys() and all(
        given[name] != default for name, default in defaults.items()
    )
    arguments = server_arguments(BenchConfig(**given))
    served = build(
        ServeConfig, collect(ServeConfig, parse(parser_for("serve", ServeConfig), arguments))
    )
    assert {name: vars(served)[name] for name in given} == given
    assert served.suffix_max_cached_requests == 0, "no answer of an earlier pass is a draft"
    for name in given.keys() - {"target", "draft_revision", "draft_dtype", "heterogeneous_vocab"}:
        with pytest.raises(UserError, match=f"{name} is for a server started here"):
            check(BenchConfig(url="x", **{name: given[name]}))


@pytest.mark.parametrize("users", [[1], [2]])
def test_modes_take_turns_and_trees_have_servers_of_their_own(
    users: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[tuple[str, dict]] = []

    class Recorded:
        def __init__(self, url: str, **options: object):
            self.url = url

        async def model(self) -> str:
            return "m"

        async def scrape(self) -> Scrape:
            return Scrape({}, {})

        async def measure(self, prompts: list, body: dict, concurrency: int) -> PassResult:
            asked.append((self.url, body.get("speculation"), len(prompts)))
            return case("", [1.0]).passes[0]

    monkeypatch.setattr(command, "Client", Recorded)
    config = BenchConfig(
        target="t", draft="d", tree=["dynamic", "sampled:2x1"], temperature=[0.0], repeats=2, k="3",
        concurrency=users,
    )  # fmt: skip
    check(config)
    urls = {"": "chain", "dynamic": "first", "sampled:2x1": "second"}
    cases, _ = asyncio.run(command.measure(config, urls, [{"prompt": "x"}, {"prompt": "y"}]))
    size = 1 if users == [1] else 2
    assert [(one.mode, [len(each.answers) for each in one.passes]) for one in cases] == [
        (mode, [4 // size] * 2) for mode in ("off", "on", "dynamic", "sampled:2x1")
    ]
    modes = [
        ("chain", {"k": 0, "report": True}),
        ("chain", {"k": 3, "report": True}),
        ("first", {"report": True}),
        ("second", {"report": True}),
    ]
    forwards = [(*mode, size) for mode in modes]
    turns = [*forwards, *reversed(forwards)]
    # One request of each before the passes.
    assert asked == [(*mode, 1) for mode in modes] + (turns if size == 2 else
                     [*turns, *reversed(forwards), *forwards])  # fmt: skip
    assert server_arguments(config, "dynamic")[-2:] == ["--tree", "dynamic"]
    # A k of the request alone is but the most that `--k auto` of a server may choose.
    assert server_arguments(config)[-2:] == ["--k", "3"]


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"url": "x", "tree": ["dynamic"]}, "tree is for a server started here"),
        ({"target": "t", "tree": ["bush"]}, "tree is 'bush'"),
        ({"url": "x", "k": "auto"}, "k auto is for a server started here"),
        ({"target": "t", "k": "few"}, "k is 'few'; give a whole number or auto"),
    ],
)
def test_drafts_that_cannot_be_measured(options: dict, words: str) -> None:
    with pytest.raises(UserError, match=words):
        check(BenchConfig(**options))


def test_tau_of_a_server_that_reports_on_no_answer_is_that_of_its_counters(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """vLLM: of four rounds that an answer takes, three keep a token and one of these another."""
    answered = 0

    def handle(request: httpx.Request) -> httpx.Response:
        nonlocal answered
        if request.url.path == "/v1/models":
            return httpx.Response(200, json={"data": [{"id": "m"}]})
        if request.url.path == "/metrics":
            counts = (
                ("drafts", "", 4), ("draft_tokens", "", 8), ("accepted_tokens", "", 4),
                ("accepted_tokens_per_pos", ',position="0"', 3),
                ("accepted_tokens_per_pos", ',position="1"', 1),
            )  # fmt: skip
            lines = [
                f"# TYPE vllm:spec_decode_num_{name}_total counter\n"
                f'vllm:spec_decode_num_{name}_total{{model_name="m"{label}}} {count * answered}\n'
                for name, label, count in counts
            ]
            return httpx.Response(200, text="".join(lines))
        answered += 1
        chunk = {"choices": [{"text": "a"}], "usage": {"completion_tokens": 8}}
        return httpx.Response(200, text=f"data: {json.dumps(chunk)}\n\ndata: [DONE]\n\n")

    class Vllm(Client):
        def __init__(self, url: str, **options: object):
            transport = httpx.MockTransport(handle)
            self.http = httpx.AsyncClient(base_url="http://server", transport=transport)

    monkeypatch.setattr(command, "Client", Vllm)
    config = BenchConfig(url="x", modes=["plain"], temperature=[0.0], repeats=2)
    cases, _ = asyncio.run(command.measure(config, {"": "x"}, [{"prompt": "x"}] * 3))
    found = figures(cases[0])
    assert found["acceptance"] == {
        "rounds": 24, "tau": 2.0, "tau_95": [2.0, 2.0], "alpha": [0.75, pytest.approx(1 / 3)]
    }  # fmt: skip
    assert " 2.00  0.75 0.33" in table([found])
