"""`draftsmith chat` against a stand-in for an OpenAI server."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from typing import Any

import httpx
import pytest

from draftsmith.cli import main

STREAMS = {
    "page": "<html>a page</html>",
    "ended": "data: [DONE]\n\n",
    "number": "data: 3\n\n",
    "choice": 'data: {"choices": ["a"]}\n\n',
    "delta": 'data: {"choices": [{"delta": 3}]}\n\n',
    "uncounted": 'data: {"choices": [{"delta": {"content": "a"}}]}\n\n'
    'data: {"choices": [], "usage": {"completion_tokens": null}}\n\n',
}


class Server(httpx.SyncByteStream):
    """Answers with the number of messages, in two parts; `asked` has the bodies."""

    def __init__(self, owner: str = "somebody", broken: str = "") -> None:
        self.broken = broken
        self.listed: Any = [{"id": "m", "owned_by": owner}]
        self.asked: list[dict[str, Any]] = []

    def __call__(self, request: httpx.Request) -> httpx.Response:
        self.waits_s = request.extensions["timeout"]
        if request.url.path == "/v1/models":
            return httpx.Response(200, json={"data": self.listed})
        self.asked.append(json.loads(request.content))
        if self.broken == "refused":
            return httpx.Response(400, json={"error": {"message": "too long"}})
        if self.broken in STREAMS:
            return httpx.Response(200, text=STREAMS[self.broken])
        return httpx.Response(200, stream=self)

    def __iter__(self) -> Iterator[bytes]:
        body = self.asked[-1]
        if self.broken == "at once" and len(self.asked) == 1:
            raise KeyboardInterrupt
        for text in (f"answer {len(body['messages'])}", " \u2028and more"):
            delta = {"choices": [{"delta": {"content": text}}]}
            event = f"data: {json.dumps(delta, ensure_ascii=False)}\n\n".encode()
            yield event[:20]
            yield event[20:]
            if self.broken == "interrupted" and len(self.asked) == 1:
                raise KeyboardInterrupt
        if "speculation" in body:
            metrics = {"speculative_decoding": {"tau": 2.5}}
            yield f"data: {json.dumps({'choices': [], 'metrics': metrics})}\n\n".encode()
        usage = {"choices": [], "usage": {"completion_tokens": 7}}
        yield f"data: {json.dumps(usage)}\n\ndata: [DONE]\n\n".encode()


def talk(
    server: Server, monkeypatch: pytest.MonkeyPatch, *lines: str, options: Sequence[str] = ()
) -> int:
    """Status of the command when these lines are typed; `^C` stands for an interrupt."""
    left = iter(lines)

    def typed(prompt: str) -> str:
        line = next(left, None)
        if line is None:
            raise EOFError
        if line == "^C":
            raise KeyboardInterrupt
        return line

    client = httpx.Client
    monkeypatch.setattr("builtins.input", typed)
    monkeypatch.setattr(
        httpx, "Client", lambda **o: client(**o, transport=httpx.MockTransport(server))
    )
    return main(["chat", "--url", "http://stand-in/v1", *options])


def test_answers_stream_into_a_history(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    server = Server()
    assert talk(server, monkeypatch, "one", "", "^C", "two", "/new", "three", "/exit", "four") == 0
    shown = capsys.readouterr().out
    assert [len(body["messages"]) for body in server.asked] == [1, 3, 1]
    assert server.asked[1]["messages"][1] == {
        "role": "assistant", "content": "answer 1 \u2028and more",
    }  # fmt: skip
    assert "answer 3 \u2028and more\n[7 tokens, " in shown and "tok/s]" in shown
    assert server.waits_s["connect"] <= 10 < server.waits_s["read"]
    assert all("speculation" not in body and body["model"] == "m" for body in server.asked)


def test_our_server_is_asked_for_tau(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert talk(Server("draftsmith"), monkeypatch, "one") == 0
    assert " tok/s, tau 2.50]" in capsys.readouterr().out


def test_an_interrupt_ends_the_answer_and_not_the_chat(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    server = Server(broken="interrupted")
    assert talk(server, monkeypatch, "one", "two") == 0
    assert server.asked[1]["messages"][1]["content"] == "answer 1"
    assert "answer 1\n[1 tokens, " in capsys.readouterr().out


def test_an_interrupt_before_the_answer_leaves_no_turn(monkeypatch: pytest.MonkeyPatch) -> None:
    server = Server(broken="at once")
    assert talk(server, monkeypatch, "one", "two") == 0
    assert [body["messages"] for body in server.asked] == [
        [{"role": "user", "content": text}] for text in ("one", "two")
    ]


def test_unknown_commands_are_not_sent(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    server = Server()
    assert talk(server, monkeypatch, "/help me", "/", "//new") == 0
    assert [body["messages"][0]["content"] for body in server.asked] == ["/new"]
    shown = capsys.readouterr().out
    assert shown.count("/new begins another conversation") == 3
    assert "/help is no command: Ctrl-C ends" in shown


def test_a_refused_message_is_none_of_the_history(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    server = Server(broken="refused")
    assert talk(server, monkeypatch, "one", "two") == 0
    assert [len(body["messages"]) for body in server.asked] == [1, 1]
    assert capsys.readouterr().err == "draftsmith: error: too long\n" * 2


@pytest.mark.parametrize("broken, said", [
    ("page", "the server sent text/plain; charset=utf-8, no stream of answers; check --url"),
    ("ended", "the server sent text/plain; charset=utf-8, no stream of answers; check --url"),
    ("number", "the server sent '3'; check --url"),
    ("choice", """the server sent '{"choices": ["a"]}'; check --url"""),
    ("delta", """the server sent '{"choices": [{"delta": 3}]}'; check --url"""),
])  # fmt: skip
def test_an_answer_that_is_none_is_told_and_none_of_the_history(
    broken: str, said: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    server = Server(broken=broken)
    assert talk(server, monkeypatch, "one", "two") == 0
    assert [len(body["messages"]) for body in server.asked] == [1, 1]
    assert capsys.readouterr().err == f"draftsmith: error: {said}\n" * 2


def test_a_server_that_counts_no_tokens_has_its_parts_counted(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert talk(Server(broken="uncounted"), monkeypatch, "one") == 0
    assert "a\n[1 tokens, " in capsys.readouterr().out


@pytest.mark.parametrize("given", [{}, {"max_tokens": 9}, {"temperature": 0.0, "max_tokens": 1}])
def test_only_the_sampling_that_is_given_is_sent(
    given: dict[str, float], monkeypatch: pytest.MonkeyPatch
) -> None:
    server = Server()
    options = [f"{name}={value}" for name, value in given.items()]
    assert talk(server, monkeypatch, "one", options=options) == 0
    sent = {name: server.asked[0].get(name) for name in ("max_tokens", "temperature")}
    assert {name: value for name, value in sent.items() if value is not None} == given
    assert talk(server, monkeypatch, "one", options=["--max-tokens", "0"]) == 2


@pytest.mark.parametrize("listed", [None, ["m"], [3, {"id": "m"}]])
def test_a_model_that_is_given_need_not_be_listed(
    listed: Any, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    server = Server()
    server.listed = listed
    assert talk(server, monkeypatch, "one", options=["--model", "other"]) == 0
    assert server.asked[0]["model"] == "other"
    told = "http://stand-in serves m, not 'other'; it may" in capsys.readouterr().out
    assert told == (listed == [3, {"id": "m"}])


def test_a_model_that_our_server_has_not_is_refused_before_it_is_asked(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    server = Server("draftsmith")
    assert talk(server, monkeypatch, "one", options=["--model", "other"]) == 2
    assert server.asked == []
    said = "http://stand-in serves m, not 'other'; give one of its names as --model"
    assert capsys.readouterr().err == f"draftsmith: error: {said}\n"


def test_a_server_that_lists_none_is_one_sentence(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    server = Server()
    server.listed = None
    assert talk(server, monkeypatch, "one") == 2
    assert "lists no models" in capsys.readouterr().err


def test_a_server_that_is_not_there_is_one_sentence(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["chat", "--url", "http://127.0.0.1:9"]) == 2
    told, said = capsys.readouterr()
    assert told == "asking http://127.0.0.1:9 for its models\n"
    assert said.count("\n") == 1 and "lists no models" in said and "check --url" in said
