"""The dashboard's page and data without a browser, `draftsmith top` against a running server, and
what may not be seen."""

from __future__ import annotations

import os
import pty
import re
import select
import signal
import subprocess
import time
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest

from draftsmith.cli import main
from draftsmith.drafters.target.target import Target
from draftsmith.drafters.text.ngram import Ngram
from draftsmith.drafters.versions import publish, record_decision
from draftsmith.serve.config import EngineConfig
from tests.forked import cli

REPEATS = {"max_tokens": 40, "temperature": 0, "ignore_eos": True}
KEYS = ("secret",)
BEARER = {"authorization": "Bearer secret"}


@pytest.fixture(scope="module")
def server(target: Target, live_server: Callable, tmp_path_factory: pytest.TempPathFactory) -> Any:
    """With a version and decisions."""
    root = tmp_path_factory.mktemp("versions")
    gate = {"gain": 0.02, "p_value": 0.001}
    publish(
        root, lambda folder: None, family="eagle3", target={}, parent=None, data_range={}, gate=gate
    )
    record_decision(root, {"decision": "rolled back", "reason": "it is worse", "version": 1})
    server = live_server(target, Ngram(min_n=1, max_n=3), EngineConfig(k=3, max_batch=4))
    server.dashboard.versions = str(root)
    return server


@pytest.fixture(scope="module")
def guarded(target: Target, live_server: Callable) -> Any:
    return live_server(
        target, Ngram(min_n=1, max_n=3), EngineConfig(k=3, max_batch=4), api_key=KEYS
    )


def test_data_is_what_metrics_say(server: Any) -> None:
    for name in ("code", "prose"):
        assert server.complete("abcabcabcabc", request_class=name, **REPEATS).status_code == 200
    server.dashboard.history.look()
    data = server.http.get("/dashboard/data").json()
    rounds = server.metric("draftsmith_drafting_rounds_total")
    now = data["points"][-1]
    assert now["tau"] == server.metric("draftsmith_committed_total") / rounds
    assert now["alpha"][0] == server.metric(
        "draftsmith_accepted_total", position="0"
    ) / server.metric("draftsmith_reached_total", position="0")
    tables = {table["title"]: [row["cells"] for row in table["rows"]] for table in data["tables"]}
    classes = tables["Classes of requests"]
    assert [row[0] for row in classes] == ["code", "prose"]
    assert sum(int(row[1]) for row in classes) == rounds
    facts = {label: text for label, text, _ in data["facts"]}
    assert facts["draft"].startswith("ngram") and facts["alarms"] == "1"
    assert tables["Versions"][0][0] == "1 live" and tables["Decisions"][0][1] == "rolled back"


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
    # Whatever the script reads is in the page, and in the data.
    ids = set(re.findall(r'id="([a-z-]+)"', page))
    assert set(re.findall(r'\$\("([a-z-]+)"\)', page)) <= ids
    data = server.http.get("/dashboard/data").json()
    assert set(re.findall(r"\bdata\.([a-z_]+)", page)) <= data.keys()


def test_without_a_key_nobody_sees_more_than_the_empty_page(guarded: Any) -> None:
    assert guarded.http.get("/dashboard").status_code == 200
    assert guarded.http.get("/").headers["location"] == "dashboard"
    assert guarded.http.get("/dashboard/data").status_code == 401
    assert guarded.http.get("/dashboard/data", headers=BEARER).status_code == 200


def top(server: Any, **options: Any) -> subprocess.Popen:
    words = cli("top", "--url", f"{server.url}/v1", "--every-s", "0.1")
    # A shell's background job ignores interrupts and would hand that on.
    heed = partial(signal.signal, signal.SIGINT, signal.SIG_DFL)
    return subprocess.Popen(words, preexec_fn=heed, **options)


def test_top_prints_a_line_a_refresh_into_a_pipe(server: Any) -> None:
    process = top(server, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    lines = [process.stdout.readline() for _ in range(3)]
    process.send_signal(signal.SIGINT)
    assert process.wait(30) == 0 and process.stderr.read() == ""
    assert all("tiny: " in line and "tau" in line and "\x1b" not in line for line in lines)


def test_top_draws_in_place_until_it_is_interrupted(server: Any) -> None:
    controller, terminal = pty.openpty()
    os.set_blocking(controller, False)
    process = top(server, stdin=terminal, stdout=terminal, stderr=subprocess.PIPE)
    try:
        text, deadline_s = "", time.monotonic() + 60
        while text.count("\x1b[J") < 3:
            assert time.monotonic() < deadline_s, text
            if select.select([controller], [], [], 0.1)[0]:
                text += os.read(controller, 65536).decode(errors="replace")
        assert text.startswith("\x1b[2J") and "rolled back" in text and "ngram" in text
        process.send_signal(signal.SIGINT)
        assert process.wait(30) == 0 and process.stderr.read() == b""
    finally:
        process.kill()
        process.wait()


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
