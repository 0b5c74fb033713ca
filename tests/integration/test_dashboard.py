"""The dashboard's page and data without a browser, and what may not be seen."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import pytest

from draftsmith.drafters.target.target import Target
from draftsmith.drafters.text.suffix import Suffix
from draftsmith.drafters.versions import publish, record_decision
from draftsmith.serve.config import EngineConfig

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
    server = live_server(target, Suffix(), EngineConfig(k=3, max_batch=4))
    server.dashboard.versions = str(root)
    return server


@pytest.fixture(scope="module")
def guarded(target: Target, live_server: Callable) -> Any:
    return live_server(target, Suffix(), EngineConfig(k=3, max_batch=4), api_key=KEYS)


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
    assert facts["draft"].startswith("suffix") and facts["alarms"] == "1"
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
