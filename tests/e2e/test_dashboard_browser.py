"""The dashboard in headless Chromium, on a server that asks for a key and follows versions.

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

from draftsmith.drafters.versions import publish, record_decision

pytestmark = [pytest.mark.long, pytest.mark.timeout(600)]

PROBE = Path(__file__).with_name("dashboard_probe.py")
KEY = "secret"
INJECTION = "<img src=x onerror='window.injected=true'>"


@pytest.fixture(scope="module")
def versions(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The served draft is the one without a version, so that these are only told of."""
    root = tmp_path_factory.mktemp("versions")
    for gain in (0.01, 0.02):
        gate = {"alpha_live": 0.5, "alpha_candidate": 0.5 + gain, "gain": gain, "requests": 48}
        of = {"family": "draft-lm", "target": {}, "parent": None, "data_range": {}}
        publish(root, lambda folder: None, **of, gate=gate | {"p_value": 0.001})
    accepted = {"decision": "accept", "reason": "a gain with evidence", "gain": 0.02, "version": 2}
    drift = {"decision": "drift", "reason": f"class {INJECTION} is accepted less"}
    for decision in (accepted, drift):
        record_decision(root, decision)
    (root / "status.json").write_text(json.dumps({"time_s": time.time(), "updates": 7}))
    return root


@pytest.fixture(scope="module")
def server(start_server: Callable, versions: Path, near_draft: str) -> Any:
    (versions / "current").unlink()
    followed = ("--versions", str(versions), "--poll-s", "3600", "--api-key", KEY)
    server = start_server("--draft", near_draft, "--k", "3", *followed)
    (versions / "current").write_text("2\n")
    return server


@pytest.fixture(scope="module")
def traffic(server: Any) -> Iterator[None]:
    """Two classes, one of which has a name that a page must not take for markup, until the test is
    over."""
    done = threading.Event()

    def send() -> None:
        body = {"model": "tiny", "prompt": "def draft(self, tokens):\n", "max_tokens": 60}
        key = {"authorization": f"Bearer {KEY}"}
        with httpx.Client(base_url=server.url, headers=key, timeout=60) as http:
            for number in range(10**6):
                if done.is_set():
                    return
                own = {"request_class": ("code", INJECTION)[number % 2], "seed": number}
                answer = http.post("/v1/completions", json={**body, **own, "ignore_eos": True})
                answer.raise_for_status()

    thread = threading.Thread(target=send)
    thread.start()
    yield
    done.set()
    thread.join()


@pytest.fixture(scope="module")
def seen(
    server: Any, traffic: None, run_client: Callable[..., str], versions: Path
) -> dict[str, Any]:
    folder = versions / "pictures"
    folder.mkdir()
    words = (str(PROBE), server.url, KEY, str(folder))
    told = run_client("playwright", "bin/python", *words, cwd=folder)
    assert all((folder / name).stat().st_size > 10_000 for name in ("dark.png", "phone.png"))
    return json.loads(told.splitlines()[-1])


@pytest.mark.parametrize("kind", ["dark", "phone"])
def test_what_a_reader_sees(seen: dict[str, Any], kind: str) -> None:
    view = seen[kind]
    assert view["errors"] == [] and view["foreign"] == []
    assert not view["behind_the_door"] and not view["door_after_key"]
    assert view["wrong_key"] == "that key does not open it"
    assert view["overflow"] == 0, "a page that scrolls sideways is not readable on a phone"
    assert view["model"] == "tiny" and view["charts"] == 3
    assert "draft-lm 0" in view["facts"] and "7 updates" in view["facts"]
    rows = [row for table in view["tables"] for row in table]
    assert ["2 live", "0.5000 -> 0.5200", "0.0200"] in [row[:3] for row in rows]
    assert view["alarms"] == 1 and any("accepted less" in row[-1] for row in rows)


def test_names_of_clients_are_text_and_no_markup(seen: dict[str, Any]) -> None:
    for view in seen.values():
        classes = [row[0] for table in view["tables"] for row in table]
        assert not view["injected"] and INJECTION in classes and "code" in classes


def test_it_is_dark_where_the_reader_wants_it_dark(seen: dict[str, Any]) -> None:
    dark, light = (sum(map(int, seen[k]["paper"][4:-1].split(","))) for k in ("dark", "phone"))
    assert dark < 150 < 600 < light
