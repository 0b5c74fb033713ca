"""The dashboard in headless Chromium, on a server that asks for a key, follows versions and shows
text.

playwright has an environment of its own (`scripts/test --all` makes it); the browser is the
machine's, or playwright's.
"""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from draftsmith.drafters.published.versions import publish, record_decision

pytestmark = [pytest.mark.long, pytest.mark.timeout(600)]

PROBE = Path(__file__).with_name("dashboard_probe.py")
KEY = "secret"
INJECTION = "<img src=x onerror='window.injected=true'>"


@pytest.fixture(scope="module")
def versions(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The served draft is the one without a version, so that these are only told of."""
    root = tmp_path_factory.mktemp("versions")
    for gain in (0.01, 0.02):
        gate = {
            "alpha_live": 0.5,
            "alpha_candidate": 0.5 + gain,
            "gain": gain,
            "requests": 48,
            "p_value": 0.001,
        }
        publish(
            root,
            lambda folder: None,
            family="draft-lm",
            target={},
            parent=None,
            data_range={},
            gate=gate,
        )
    record_decision(
        root, {"decision": "accept", "reason": "a gain with evidence", "gain": 0.02, "version": 2}
    )
    record_decision(root, {"decision": "drift", "reason": f"class {INJECTION} is accepted less"})
    pool = {INJECTION: {"serving": False, "requests": 40, "updates": 2}}
    (root / "status.json").write_text(
        json.dumps({"time_s": time.time(), "updates": 7, "pool": pool})
    )
    return root


@pytest.fixture(scope="module")
def server(start_server: Callable, versions: Path, near_draft: str) -> Any:
    (versions / "current").unlink()
    server = start_server(
        "--draft",
        near_draft,
        "--k",
        "3",
        "--versions",
        str(versions),
        "--poll-s",
        "3600",
        "--api-key",
        KEY,
        "--dashboard-text",
    )
    (versions / "current").write_text("2\n")
    return server


@pytest.fixture(scope="module")
def traffic(server: Any) -> Iterator[None]:
    """Two classes, one of which has a name that a page must not take for markup, until the test is
    over."""
    done = threading.Event()

    def send() -> None:
        with httpx.Client(
            base_url=server.url, headers={"authorization": f"Bearer {KEY}"}, timeout=60
        ) as http:
            for number in range(10**6):
                if done.is_set():
                    return
                body = {
                    "model": "tiny",
                    "prompt": "def draft(self, tokens):\n",
                    "max_tokens": 60,
                    "ignore_eos": True,
                }
                name = ("code", INJECTION)[number % 2]
                http.post(
                    "/v1/completions", json=body | {"request_class": name, "seed": number}
                ).raise_for_status()

    thread = threading.Thread(target=send)
    thread.start()
    yield
    done.set()
    thread.join()


@pytest.fixture(scope="module")
def seen(
    server: Any,
    traffic: None,
    run_client: Callable[..., str],
    tmp_path_factory: pytest.TempPathFactory,
) -> dict[str, Any]:
    folder = tmp_path_factory.mktemp("pictures")
    told = run_client(
        "playwright", "bin/python", str(PROBE), server.url, KEY, str(folder), cwd=folder
    )
    assert all((folder / name).stat().st_size > 10_000 for name in ("dark.png", "phone.png"))
    return json.loads(told.splitlines()[-1])


@pytest.mark.parametrize("kind", ["dark", "phone"])
def test_what_a_reader_sees(seen: dict[str, Any], kind: str) -> None:
    view = seen[kind]
    assert view["errors"] == [] and view["foreign"] == []
    assert (
        not view["behind_the_door"]
        and view["wrong_key"] == "that key does not open it"
        and not view["door_after_key"]
    )
    assert view["overflow"] == 0, "a page that scrolls sideways is not readable on a phone"
    assert view["model"] == "tiny" and view["draft"] == "draft-lm, version 0"
    assert len(view["tiles"]) == 6 and float(view["tiles"][0]) > 0 and float(view["tiles"][2]) > 1
    # tau of all and of two classes, three positions, speed with drafts, requests running and
    # waiting: lines with points.
    assert [len(view["lines"][name]) for name in ("tau", "alpha", "speed", "load")] == [3, 3, 2, 2]
    drawn = [
        *view["lines"]["tau"],
        *view["lines"]["alpha"],
        view["lines"]["speed"][0],
        *view["lines"]["load"],
    ]
    assert min(drawn) > 20, view["lines"]
    assert view["versions"][0] == "2 live" and "+0.0200" in view["versions"]
    assert view["alarms"] == ["drift"] and any(
        "accepted less" in reason for reason in view["reasons"]
    )
    assert view["accepted"] > 0 and view["rejected"] > 0
    assert "7, loss -" in view["learner"] and "sampled with a seed" in view["learner"]
    live, learning = view["drafts"]
    assert live[:2] == ["live", "0"] and live[3] == "100 %" and float(live[4]) > 1
    assert (
        learning[:4] == [f"pool/{INJECTION}", "-", "0", "0 %"]
        and learning[-1] == "learns: 40 requests, 2 updates"
    )


def test_names_of_clients_are_text_and_no_markup(seen: dict[str, Any]) -> None:
    for view in seen.values():
        assert not view["injected"] and any(INJECTION in row for row in view["classes"])
        assert view["chosen_class"] in ("code", INJECTION)


def test_it_is_dark_where_the_reader_wants_it_dark(seen: dict[str, Any]) -> None:
    brightness = {
        kind: sum(map(int, view["paper"][4:-1].split(","))) for kind, view in seen.items()
    }
    assert brightness["dark"] < 150 < 600 < brightness["phone"]
