"""The dashboard's page and data without a browser, `draftsmith top` against a running server, and
what may not be seen."""

from __future__ import annotations

import json
import os
import pty
import re
import select
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from functools import partial
from typing import Any

import httpx
import pytest

from draftsmith.cli import main
from draftsmith.distill.monitor.monitor import Monitor
from draftsmith.drafters.published.versions import publish, record_decision
from draftsmith.drafters.target.target import Target
from draftsmith.drafters.text.ngram import Ngram
from draftsmith.serve.config import EngineConfig
from draftsmith.serve.dashboard import page
from draftsmith.serve.dashboard.learning import Learning
from draftsmith.serve.dashboard.live_text import TextView
from draftsmith.serve.dashboard.schema import DashboardBody
from draftsmith.serve.http.limits import ServerLimits

REPEATS = {"max_tokens": 40, "temperature": 0, "ignore_eos": True}
KEYS = ServerLimits(api_keys=("secret",))
BEARER = {"authorization": "Bearer secret"}


@pytest.fixture(scope="module")
def target(tiny_target: Callable[..., str]) -> Target:
    return Target.load(tiny_target("llama"))


@pytest.fixture(scope="module")
def server(target: Target, live_server: Callable, tmp_path_factory: pytest.TempPathFactory) -> Any:
    """With a version, decisions, and text."""
    root = tmp_path_factory.mktemp("versions")
    publish(
        root,
        lambda folder: None,
        family="eagle3",
        target={},
        parent=None,
        data_range={},
        gate={"gain": 0.02, "p_value": 0.001},
    )
    record_decision(
        root, {"decision": "accept", "reason": "a gain with evidence", "gain": 0.02, "version": 1}
    )
    record_decision(root, {"decision": "rolled back", "reason": "it is worse", "version": 1})
    server = live_server(target, Ngram(min_n=1, max_n=3), EngineConfig(k=3, max_batch=4))
    server.dashboard.learning = Learning(str(root))
    server.dashboard.text = TextView()
    server.engine.observe_rounds(server.dashboard.text.add_round)
    return server


@pytest.fixture(scope="module")
def guarded(target: Target, live_server: Callable) -> Any:
    return live_server(target, Ngram(min_n=1, max_n=3), EngineConfig(k=3, max_batch=4), limits=KEYS)


def look(server: Any) -> None:
    history = server.dashboard.history
    history.recent.every_s = 0.0
    history.look()


def test_data_is_what_the_schema_says_and_what_metrics_say(server: Any) -> None:
    for name in ("code", "prose"):
        assert server.complete("abcabcabcabc", request_class=name, **REPEATS).status_code == 200
    look(server)
    answer = server.http.get("/dashboard/data")
    body = DashboardBody.model_validate(answer.json())
    # Nothing is told that the schema does not name.
    assert body.model_dump() == answer.json()
    assert (
        sum(point.tokens for point in body.points)
        == server.metric("vllm:generation_tokens_total")
        == 80
    )
    assert (
        set(body.classes) == {"code", "prose"}
        and sum(one.rounds for one in body.classes.values()) == body.now.rounds
    )
    rounds = server.metric("draftsmith_drafting_rounds_total")
    assert (
        body.now.rounds == rounds
        and body.now.tau == server.metric("draftsmith_committed_total") / rounds
    )
    assert body.now.alpha[0] == server.metric(
        "draftsmith_accepted_total", position="0"
    ) / server.metric("draftsmith_reached_total", position="0")
    assert body.server.drafter == "ngram" and body.server.lossless and body.server.shows_text
    assert [(one.version, one.live, one.gate["gain"]) for one in body.versions] == [(1, True, 0.02)]
    assert [one["decision"] for one in body.alarms] == ["rolled back"] and len(body.decisions) == 2


def test_how_much_is_sampled_with_a_seed_is_shown(server: Any) -> None:
    def shown() -> Any:
        return server.http.get("/dashboard/data").json()["server"]

    sampled, before = {"temperature": 1.0, "max_tokens": 8, "ignore_eos": True}, shown()
    assert server.complete("abc", **sampled).status_code == 200
    assert shown()["seeded_requests"] == before["seeded_requests"]
    assert server.complete("abc", seed=1, **sampled).status_code == 200
    after = shown()
    assert after["seeded_requests"] == before["seeded_requests"] + 1
    assert after["seeded_share"] == pytest.approx(
        server.metric("draftsmith_seeded_tokens_total")
        / server.metric("vllm:generation_tokens_total")
    )
    page = server.http.get("/dashboard").text
    assert "server.seeded_share" in page and "server.seeded_requests" in page


def test_only_points_that_are_new_are_sent(server: Any) -> None:
    look(server)
    points = server.http.get("/dashboard/data").json()["points"]
    newest = server.http.get("/dashboard/data", params={"since": points[-2]["time_s"]}).json()[
        "points"
    ]
    assert newest == points[-1:]
    assert server.http.get("/dashboard/data", params={"span": "day"}).json()["points"] == []
    for wrong in ({"span": "year"}, {"since": "yesterday"}):
        refused = server.http.get("/dashboard/data", params=wrong)
        assert refused.status_code == 400 and refused.json()["error"]["param"] == next(iter(wrong))


def test_the_page_stands_alone_and_may_load_nothing(server: Any) -> None:
    answer = server.http.get("/dashboard")
    assert answer.status_code == 200 and answer.headers["content-type"].startswith("text/html")
    policy = answer.headers["content-security-policy"]
    assert "default-src 'none'" in policy and "connect-src 'self'" in policy
    page = answer.text
    assert page.isascii() and page.startswith("<!DOCTYPE html>")
    assert not re.findall(
        r"(?:src|href)\s*=|@import|url\(|innerHTML|outerHTML|insertAdjacentHTML|document\.write",
        page,
    )
    # The only addresses are the SVG namespace's and those of this server.
    assert set(re.findall(r"https?://[^\"'`\s]+", page)) <= {"http://www.w3.org/2000/svg"}
    # Whatever the script reads is in the page.
    ids = set(re.findall(r'id="([a-z-]+)"', page))
    assert set(re.findall(r'\$\("([a-z-]+)"\)', page)) <= ids


def test_what_the_page_reads_is_in_the_data(server: Any) -> None:
    """A renamed field would leave the page blank without an error anyone sees here."""
    look(server)
    page = server.http.get("/dashboard").text
    data = server.http.get("/dashboard/data").json()
    for name, told in (
        ("server", data["server"]),
        ("now", data["now"]),
        ("draft", data["drafts"][-1]),
        ("one", data["points"][-1] | data["versions"][-1]),
        ("stream", Monitor(1e-6).numbers()["all"]),
    ):
        read = set(re.findall(rf"(?<![\w.]){name}\.([a-z_0-9]+)", page))
        foreign = {
            "name",
            "points",
            "stroke",
            "dashed",
            "rounds",
            "committed",
            "reached",
            "accepted",
            "length",
            "decision",
            "reason",
            "class",
        }
        foreign |= {"gain", "requests", "p_value", "tau", "alpha"}
        assert read and read - foreign <= set(told), name


def test_without_a_key_nobody_sees_more_than_the_empty_page(guarded: Any) -> None:
    assert guarded.http.get("/dashboard").status_code == 200
    for path in ("/dashboard/data", "/dashboard/text"):
        assert guarded.http.get(path).status_code == 401
    assert guarded.http.get("/dashboard/data", headers=BEARER).status_code == 200
    schema = guarded.http.get("/openapi.json").json()["paths"]
    assert schema["/dashboard/data"]["get"]["security"] == [{"key": []}]


def test_text_is_not_shown_unless_the_server_was_started_so(guarded: Any) -> None:
    refused = guarded.http.get("/dashboard/text", headers=BEARER)
    assert refused.status_code == 404 and "--dashboard-text" in refused.json()["error"]["message"]
    assert not guarded.http.get("/dashboard/data", headers=BEARER).json()["server"]["shows_text"]


@pytest.fixture
def short_streams(monkeypatch: pytest.MonkeyPatch) -> None:
    """Streams of text end after 1 s instead of 5."""
    monkeypatch.setattr(page, "TEXT_STREAM_S", 1.0)


def test_text_streams_while_it_is_written_and_leaves_out_who_keeps_out(
    server: Any, short_streams: None
) -> None:
    def told() -> list[dict[str, Any]]:
        events = []
        with server.http.stream("GET", "/dashboard/text", params={"after": before}) as response:
            assert response.headers["content-type"].startswith("text/event-stream")
            for line in response.iter_lines():
                if line.startswith("data: "):
                    events.append(json.loads(line[6:]))
        return events

    before = server.dashboard.text._count
    secret = server.http.post(
        "/v1/completions",
        json={"model": "tiny", "prompt": "xyzxyz", **REPEATS},
        headers={"x-draftsmith-learn": "off"},
    )
    assert secret.status_code == 200 and server.dashboard.text._count == before
    text = server.complete("abcabcabcabc", request_class="code", **REPEATS).json()["choices"][0][
        "text"
    ]
    events = told()
    told_text = "".join(one["accepted"] + one["target"] for one in events)
    # Random weights write broken characters, of which no more is asked.
    assert "".join(filter(str.isascii, told_text)) == "".join(filter(str.isascii, text)) != ""
    assert {one["request_class"] for one in events} == {"code"}
    assert any(one["accepted"] for one in events) and any(one["rejected"] for one in events)


def test_top_prints_a_line_a_refresh_into_a_pipe(server: Any) -> None:
    look(server)
    words = [
        sys.executable,
        "-m",
        "draftsmith.cli",
        "top",
        "--url",
        f"{server.url}/v1",
        "--every-s",
        "0.1",
    ]
    # A shell's background job ignores interrupts and would hand that on.
    heed = partial(signal.signal, signal.SIGINT, signal.SIG_DFL)
    process = subprocess.Popen(
        words, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, preexec_fn=heed
    )
    lines = [process.stdout.readline() for _ in range(3)]
    process.send_signal(signal.SIGINT)
    assert process.wait(30) == 0 and process.stderr.read() == ""
    assert all("tiny version" in line and "tau" in line and "\x1b" not in line for line in lines)


def test_top_draws_follows_the_window_and_quits_with_q(server: Any) -> None:
    look(server)
    controller, terminal = pty.openpty()
    os.set_blocking(controller, False)
    set_size(terminal, 24, 80)
    words = [sys.executable, "-m", "draftsmith.cli", "top", "--url", server.url, "--every-s", "0.2"]
    process = subprocess.Popen(words, stdin=terminal, stdout=terminal, stderr=subprocess.PIPE)
    try:
        first = read_until(controller, "q quits")
        assert first.startswith("\x1b[?1049h") and "rolled back" in first and "ngram" in first
        set_size(terminal, 3, 30)
        screens = read_until(controller, "\x1b[J", times=6).split("\x1b[H")
        assert len(re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", screens[-1]).split("\r\n")) <= 3
        os.write(controller, b"q")
        process.wait(30)
        assert process.returncode == 0 and process.stderr.read() == b""
        assert "\x1b[?1049l" in read_until(controller, "\x1b[?1049l")
    finally:
        process.kill()
        process.wait()


def set_size(terminal: int, rows: int, columns: int) -> None:
    import fcntl
    import struct
    import termios

    fcntl.ioctl(terminal, termios.TIOCSWINSZ, struct.pack("HHHH", rows, columns, 0, 0))


def read_until(controller: int, wanted: str, *, times: int = 1) -> str:
    text, deadline_s = "", time.monotonic() + 30
    while text.count(wanted) < times:
        assert time.monotonic() < deadline_s, text
        if select.select([controller], [], [], 0.1)[0]:
            text += os.read(controller, 65536).decode(errors="replace")
    return text


def test_top_says_in_one_sentence_why_it_cannot(
    guarded: Any, capsys: pytest.CaptureFixture[str]
) -> None:
    for flags, wanted in (
        (["--url", guarded.url], "asks for an API key"),
        (["--url", "http://127.0.0.1:9"], "does not answer"),
        (["--url", guarded.url, "--every-s", "0"], "'every_s' is 0.0"),
        (["--url", f"{guarded.url}/elsewhere", "--api-key", "secret"], "answers 404"),
    ):
        assert main(["top", *flags]) == 2
        shown = capsys.readouterr()
        assert wanted in shown.err and shown.err.count("\n") == 1


def test_a_page_left_open_holds_up_nothing(server: Any, short_streams: None) -> None:
    """Its stream of text ends by itself, so that a shutdown does not wait for it."""
    begun_s = time.monotonic()
    done = threading.Event()

    def read() -> None:
        httpx.get(f"{server.url}/dashboard/text", params={"after": 10**9}, timeout=30)
        done.set()

    threading.Thread(target=read, daemon=True).start()
    # Others are served meanwhile.
    assert server.complete("ab", max_tokens=2).status_code == 200
    assert done.wait(20) and time.monotonic() - begun_s < 15
