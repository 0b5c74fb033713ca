"""A suite in `draftsmith bench`: what is asked, in which order, and what is made of it."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path

import httpx
import pytest

from draftsmith.errors import UserError
from draftsmith.prompts.suites import Question
from draftsmith.serve.bench import command
from draftsmith.serve.bench.client import Client, PassResult, TimedAnswer
from draftsmith.serve.bench.command import check
from draftsmith.serve.bench.config import BenchConfig
from draftsmith.serve.bench.report import BenchCase, by_task, figures, speedups


def user(text: str) -> dict[str, str]:
    return {"role": "user", "content": text}


QUESTIONS = [
    Question({"messages": [user("one")]}, (user("two"), user("three")), "chat"),
    Question({"messages": [user("alone")]}, (), "qa"),
]


class Answering:
    """A server that answers with the last thing asked, in capitals."""

    def __init__(self) -> None:
        self.bodies: list[dict] = []

    def handle(self, request: httpx.Request) -> httpx.Response:
        if request.url.path == "/v1/models":
            return httpx.Response(200, json={"data": [{"id": "m"}]})
        if request.url.path == "/metrics":
            return httpx.Response(200, text="")
        body = json.loads(request.content)
        self.bodies.append(body)
        text = body["messages"][-1]["content"].upper()
        if len(text) > 1000:
            return httpx.Response(400, json={"error": {"message": "too long for the context"}})
        speculates = body["speculation"].get("k") != 0
        report = {
            "per_step_drafted": [2] if speculates else [],
            "per_step_accepted": [1] if speculates else [],
            "per_step_committed": [2] if speculates else [],
            "num_target_passes": 2,
            "num_committed_tokens": 3,
        }
        chunks = [
            {"choices": [{"delta": {"role": "assistant"}}]},
            {"choices": [{"delta": {"content": text}}]},
            {
                "choices": [],
                "usage": {"completion_tokens": 3},
                "metrics": {"speculative_decoding": report},
            },
        ]
        lines = [f"data: {json.dumps(chunk)}\n\n" for chunk in chunks]
        return httpx.Response(200, content="".join([*lines, "data: [DONE]\n\n"]).encode())

    def client(self) -> Client:
        client = Client("http://server", api_key=None, timeout_s=5)
        client.http = httpx.AsyncClient(
            base_url="http://server", transport=httpx.MockTransport(self.handle)
        )
        return client


@pytest.mark.parametrize("is_open", [False, True])
def test_a_turn_is_asked_behind_the_answer_served_before_it(is_open: bool) -> None:
    server = Answering()
    body = {"speculation": {"report": True}}
    client = server.client()
    result = asyncio.run(
        client.measure_open(QUESTIONS, body, [0.0, 0.0])
        if is_open
        else client.measure(QUESTIONS, body, 1)
    )
    assert [(one.task, one.prompt, one.text) for one in result.answers] == [
        ("chat", 0, "ONE"),
        ("chat", 0, "TWO"),
        ("chat", 0, "THREE"),
        ("qa", 1, "ALONE"),
    ]
    asked = [[turn["content"] for turn in body["messages"]] for body in server.bodies]
    assert sorted(asked, key=lambda turns: (turns[0] == "alone", len(turns))) == [
        ["one"],
        ["one", "ONE", "two"],
        ["one", "ONE", "two", "TWO", "three"],
        ["alone"],
    ]
    assert QUESTIONS[0].fields == {"messages": [user("one")]}


@pytest.fixture
def server(monkeypatch: pytest.MonkeyPatch) -> Answering:
    found = Answering()
    monkeypatch.setattr(command, "Client", lambda url, **options: found.client())
    return found


@pytest.fixture
def suite(tmp_path: Path) -> str:
    rows = [{"category": one, "turns": ["one", "two"]} for one in ("chat", "chat", "qa")]
    path = tmp_path / "suite.jsonl"
    path.write_text("\n".join(map(json.dumps, rows)), encoding="utf-8")
    return str(path)


def test_a_suite_is_measured_by_task(
    server: Answering, suite: str, tmp_path: Path, capsys: pytest.CaptureFixture
) -> None:
    out = tmp_path / "o.json"
    config = BenchConfig(
        url="http://me:pw@x",
        suite=suite,
        temperature=[0.0],
        repeats=2,
        concurrency=[1, 2],
        out=str(out),
    )
    assert command.run(config) == 0
    found = json.loads(out.read_text(encoding="utf-8"))
    for case in found["cases"]:
        assert {task: len(own["tokens"]) for task, own in case["tasks"].items()} == {
            "chat": 2,
            "qa": 1,
            "all tasks": 3,
        }
        # Two passes of two turns of three tokens.
        assert set(case["tasks"]["all tasks"]["tokens"]) == {12}
        assert case["tasks"]["qa"]["tokens_per_pass"] == 1.5
    assert [(one["concurrency"], one["mode"]) for one in found["speedups"]] == [
        (1, "on"),
        (2, "on"),
    ]
    assert [case["acceptance"] is None for case in found["cases"]] == [True, False] * 2
    said = capsys.readouterr().out
    assert "suite.jsonl: 3 of 3 prompts" in said
    rows = [line.split("|")[2:4] for line in said.split("\n") if line.startswith("| 0 ")]
    assert [[cell.strip() for cell in row] for row in rows] == [
        [users, task] for users in ("1", "2") for task in ("chat", "qa", "all tasks")
    ]
    page = out.with_suffix(".html").read_text(encoding="utf-8")
    assert found["config"]["url"] == "http://x" and "me:pw" not in said + page
    assert "draftsmith bench" in page and "<td>all tasks<td>" in page and "image/png" in page


def test_a_suite_is_asked_as_its_papers_ask_it_unless_told_otherwise(
    server: Answering, suite: str
) -> None:
    config = BenchConfig(url="x", suite=suite, temperature=[0.0], repeats=1)
    command.run(config)
    assert {body["max_tokens"] for body in server.bodies} == {1024}
    assert not any("ignore_eos" in body for body in server.bodies)
    server.bodies.clear()
    command.run(BenchConfig(url="x", suite=suite, repeats=1, max_tokens=7, ignore_eos=True))
    assert {(body["max_tokens"], body["ignore_eos"]) for body in server.bodies} == {(7, True)}


def test_no_pass_finds_prompts_that_another_has_cached(server: Answering, suite: str) -> None:
    command.run(BenchConfig(url="x", suite=suite, repeats=2, concurrency=[1, 2]))
    salts = [body.get("cache_salt") for body in server.bodies]
    # 2 numbers of users, 2 temperatures, off and on, twice; 6 requests each. The first request of
    # a kind comes before.
    passes = {salt for salt in salts if salt is not None}
    assert len(passes) == 16 and all(salts.count(salt) == 6 for salt in passes)
    # Nor prompts of another run at the same server.
    server.bodies.clear()
    command.run(BenchConfig(url="x", suite=suite, repeats=2, concurrency=[1, 2]))
    assert not passes & {body.get("cache_salt") for body in server.bodies}


def test_plain_servers_get_no_field_of_ours(server: Answering, suite: str) -> None:
    asked: list[dict] = []

    def handle(request: httpx.Request) -> httpx.Response:
        if request.url.path.endswith("completions"):
            asked.append(json.loads(request.content))
            chunk = {"choices": [{"delta": {"content": "x"}}], "usage": {"completion_tokens": 1}}
            return httpx.Response(200, content=f"data: {json.dumps(chunk)}\n\n".encode())
        return Answering().handle(request)

    server.handle = handle  # type: ignore[method-assign]
    command.run(BenchConfig(url="x", suite=suite, repeats=1, modes=["plain"]))
    assert {key for body in asked for key in body} == {
        "model", "max_tokens", "temperature", "messages", "stream", "stream_options",
    }  # fmt: skip


def test_a_prompt_that_does_not_fit_is_left_out_and_counted(
    server: Answering, tmp_path: Path, capsys: pytest.CaptureFixture
) -> None:
    rows = [{"task": "a", "turns": ["x" * 2000, "two"]}, {"task": "a|b", "turns": ["one", "two"]}]
    path, out = tmp_path / "suite.jsonl", tmp_path / "o.json"
    path.write_text("\n".join(map(json.dumps, rows)), encoding="utf-8")
    options = {"url": "x", "suite": str(path), "temperature": [0.0], "repeats": 2}
    assert command.run(BenchConfig(**options, out=str(out))) == 0
    found = json.loads(out.read_text(encoding="utf-8"))
    # Two turns in two passes, off and on.
    assert found["refused"] == 8
    assert [list(case["tasks"]) for case in found["cases"]] == [["a|b", "all tasks"]] * 2
    said = capsys.readouterr()
    assert "8 requests were refused and are left out: too long for the context" in said.err
    assert "| a\\|b " in said.out
    path.write_text(json.dumps(rows[0]), encoding="utf-8")
    with pytest.raises(UserError, match="refused every request: too long for the context"):
        command.run(BenchConfig(**options))


def test_a_place_that_no_file_can_take_is_refused_first(
    server: Answering, suite: str, tmp_path: Path
) -> None:
    for place, says in ((tmp_path, "a folder"), (Path(suite) / "x", "below the file")):
        with pytest.raises(UserError, match=says):
            command.run(BenchConfig(url="x", suite=suite, out=str(place)))
    assert not server.bodies


def test_a_result_is_no_page_and_names_of_tasks_are_drawn_as_they_are(
    server: Answering, tmp_path: Path
) -> None:
    suite, out = tmp_path / "suite.jsonl", tmp_path / "v1.5"
    suite.write_text(json.dumps({"category": r"pay$\x$", "turns": ["one"]}), encoding="utf-8")
    options = {"url": "x", "suite": str(suite), "repeats": 1}
    with pytest.raises(UserError, match="the page that is written beside"):
        command.run(BenchConfig(**options, out=f"{out}.html"))
    command.run(BenchConfig(**options, out=str(out)))
    assert json.loads(out.read_text(encoding="utf-8"))["cases"]
    assert "image/png" in (tmp_path / "v1.5.html").read_text(encoding="utf-8")


def answers(task: str, prompt: int, seconds: float, kept: list[int] | None) -> TimedAnswer:
    report = {
        "per_step_drafted": [2] * len(kept or []),
        "per_step_accepted": kept or [],
        "per_step_committed": [1 + one for one in kept or []],
        "num_target_passes": 5,
        "num_committed_tokens": 10,
    }
    return TimedAnswer(
        num_tokens=10, first_s=0.1, last_s=seconds, report=report, prompt=prompt, task=task
    )


def cases() -> list[dict]:
    """Two prompts a task, twice as fast on; of `b` nothing was drafted."""
    found = []
    for mode, times in (("off", 1.0), ("on", 0.5)):
        drafted = {"a": [2, 0], "b": []} if mode == "on" else {"a": None, "b": None}
        one = PassResult(
            [answers(task, number, (1 + number) * times, drafted[task])
             for number, task in enumerate(("a", "a", "b", "b"))],
            10.0 * times,
        )  # fmt: skip
        case = BenchCase(0.0, mode, [one, one], 4)
        found.append(figures(case) | {"tasks": by_task(case)})
    return found


def test_figures_of_a_task() -> None:
    off, on = cases()
    assert off["tasks"]["a"]["tokens"] == [20, 20] and off["tasks"]["a"]["seconds"] == [2, 4]
    assert off["tasks"]["a"]["tokens_per_s_user"] == pytest.approx(40 / 6)
    low, high = off["tasks"]["a"]["tokens_per_s_user_95"]
    assert (low, high) == (pytest.approx(5.0), pytest.approx(10.0))
    assert on["tasks"]["a"]["acceptance"]["tau"] == 2.0
    assert on["tasks"]["b"]["acceptance"] is None
    (gained,) = speedups([off, on])
    for own in gained["tasks"].values():
        # Prompts are drawn for both together, so that their own lengths do not widen it.
        assert own["speedup"] == pytest.approx(2.0) and own["speedup_95"] == pytest.approx([2, 2])


def test_intervals_draw_prompts_and_not_passes() -> None:
    """The same greedy answers in more passes are no more evidence."""
    prompts = [answers("a", number, 1.0, [number % 3]) for number in range(6)]
    once, often = (
        figures(BenchCase(0.0, "on", [PassResult(prompts, 1.0)] * passes))["acceptance"]
        for passes in (1, 9)
    )
    assert often["tau_95"] == once["tau_95"] and often["rounds"] == 9 * once["rounds"]


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"suite": "gsm8k", "prompts": "x.jsonl"}, "prompts is 'x.jsonl' and chooses other"),
        ({"suite": "gsm8k", "num_prompts": 4}, "num_prompts is 4 and chooses other"),
        ({"concurrency": [1, 2], "request_rate": 4.0}, "concurrency is "),
        ({"concurrency": []}, "concurrency is "),
        ({"concurrency": [1, 0]}, "concurrency"),
        ({"suite_share": 0.0, "suite": "gsm8k"}, "suite_share"),
    ],
)
def test_options_of_a_suite_that_are_refused(options: dict, words: str) -> None:
    with pytest.raises(UserError, match=words):
        check(BenchConfig(url="x", **options))
