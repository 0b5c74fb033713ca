"""What the dashboard is told: rates of the last minute, tables of the server's counts, and learning
from files that may be absent, torn or damaged."""

from __future__ import annotations

import json
import re
import time
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from draftsmith.drafters.versions import publish, record_decision, rollback
from draftsmith.kernels.acceptance import AcceptanceCounts, bucket_of
from draftsmith.serve.metrics.dashboard import (
    DECISIONS_SHOWN,
    POINTS,
    VERSIONS_SHOWN,
    WINDOW,
    History,
    Source,
)
from draftsmith.serve.stats import EngineStats

Table = list[list[str]]


@pytest.fixture
def engine() -> Any:
    """What a source reads of an engine."""
    scheduler = SimpleNamespace(running=[], waiting=[], blocks=SimpleNamespace(usage=0.25))
    return SimpleNamespace(stats=EngineStats(), drafter=None, scheduler=scheduler)


@pytest.fixture
def told(engine: Any, tmp_path: Path) -> Callable[[], dict[str, Any]]:
    source = Source(History(engine), {}, "m", str(tmp_path))

    def read() -> dict[str, Any]:
        found = source.read()
        json.dumps(found, allow_nan=False)
        return found

    return read


def learner_of(told: dict[str, Any]) -> list[str]:
    return [text for name, text, _ in told["facts"] if name == "learner"]


def cells(told: dict[str, Any], title: str) -> Table:
    return [
        row["cells"] for table in told["tables"] for row in table["rows"] if table["title"] == title
    ]


def marks(told: dict[str, Any], title: str) -> list[str]:
    return [
        row["mark"] for table in told["tables"] for row in table["rows"] if table["title"] == title
    ]


def published(root: Path, gain: float | None = 0.01) -> int:
    gate = {"gain": gain, "reason": "a gain", "alpha_live": 0.5, "alpha_candidate": 0.52}
    return publish(
        root, lambda folder: None, family="eagle3", target={}, parent=None, data_range={}, gate=gate
    )


def test_points_are_rates_of_the_last_minute(engine: Any) -> None:
    history = History(engine)
    for committed, offered, accepted in ((1, 2, 0), (3, 2, 2), (2, 2, 1), (2, 1, 1)):
        engine.stats.num_generation_tokens += committed
        engine.stats.count_round(offered, accepted, committed, version="1")
        history.look()
    assert history.points[1]["tau"] == 2.0 and history.points[1]["alpha"] == [0.5, 1.0]
    assert history.points[3]["tau"] == 2.0 and history.points[3]["alpha"] == [0.75, 0.5]
    for _ in range(WINDOW + 1):
        history.look()
    assert history.points[-1]["tau"] is None and history.points[-1]["alpha"] == [None, None]
    assert history.points[-1]["tokens_per_s"] == 0
    for _ in range(POINTS):
        history.look()
    assert len(history.points) == POINTS


def test_a_server_that_does_not_learn_has_nothing_to_tell(engine: Any, tmp_path: Path) -> None:
    for versions in (None, str(tmp_path / "none")):
        found = Source(History(engine), {}, "m", versions).read()
        assert found["tables"] == [] and learner_of(found) == []
        assert ("alarms", "0", "") in found["facts"]
        assert [text for name, text, _ in found["facts"] if name == "tau"] == ["-"]


def test_seeded_traffic_is_a_fact(engine: Any, told: Callable) -> None:
    engine.stats.num_generation_tokens, engine.stats.num_seeded_tokens = 1000, 425
    engine.stats.num_seeded_requests = 3
    (text,) = (text for name, text, _ in told()["facts"] if name == "seeded")
    assert text.startswith("42.5 % of the tokens (3 requests) are neither learned from")


def test_classes_and_contexts_have_their_own_rates(engine: Any) -> None:
    counts = AcceptanceCounts()
    counts.add([2], [1], [2])
    found = Source(History(engine), {"": counts, "code": counts}, "m").read()
    row = ["1", "2.00", "1.00 0.00"]
    assert cells(found, "Classes of requests") == [["(no class)", *row], ["code", *row]]
    for context in (10, 3000):
        engine.stats.count_round(2, 1, 2, version="1", bucket=bucket_of(context))
    found = Source(History(engine), {}, "m").read()
    contexts = cells(found, "Tokens before the round")
    assert [one[0] for one in contexts] == ["0-256", "2k-4k"]


def test_versions_carry_their_gate_and_the_live_one_is_marked(
    told: Callable, tmp_path: Path
) -> None:
    assert [published(tmp_path, gain) for gain in (0.01, 0.02)] == [1, 2]
    found = told()
    assert [row[:3] for row in cells(found, "Versions")] == [
        ["2 live", "0.5000 -> 0.5200", "0.0200"], ["1", "0.5000 -> 0.5200", "0.0100"],
    ]  # fmt: skip
    assert marks(found, "Versions") == ["live", ""]
    rollback(tmp_path, 1, "it is worse")
    found = told()
    assert marks(found, "Versions") == ["", "live"]
    assert marks(found, "Decisions")[0] == "alarm" and ("alarms", "1", "alarm") in found["facts"]
    for _ in range(VERSIONS_SHOWN):
        published(tmp_path)
    assert len(cells(told(), "Versions")) == VERSIONS_SHOWN


def test_the_latest_decisions_are_told_and_some_are_alarms(told: Callable, tmp_path: Path) -> None:
    for decision in ("accept", "hold", "refuse", "rolled back", "drift"):
        record_decision(tmp_path, {"decision": decision})
    assert [row[1] for row in cells(told(), "Decisions")][::-1] == [
        "accept", "hold", "refuse", "rolled back", "drift",
    ]  # fmt: skip
    assert marks(told(), "Decisions")[::-1] == ["", "", "alarm", "alarm", "alarm"]
    for number in range(DECISIONS_SHOWN):
        record_decision(tmp_path, {"decision": "hold", "version": number})
    rows = cells(told(), "Decisions")
    assert len(rows) == DECISIONS_SHOWN and rows[0][2] == str(DECISIONS_SHOWN - 1)


def test_streams_with_an_alarm_and_the_latest_ones_are_told(told: Callable, tmp_path: Path) -> None:
    stream = {"positions": 900, "z_accepted": 0.4, "z_emitted": -1.1, "log10_evidence": -0.5}
    streams = {"all": stream, "version 2 on b:8001": {**stream, "z_accepted": 9.1, "alarm": 1.0}}
    streams |= {f"version {version} on a:8000": stream for version in range(3, 9)}
    status = {"time_s": time.time(), "losslessness": streams, "lossless_alarms": 1}
    (tmp_path / "status.json").write_text(json.dumps(status))
    found = told()
    first, *others = cells(found, "Losslessness of records")
    assert first[:3] == ["version 2 on b:8001", "NOT LOSSLESS", "900"] and "9.1" in first
    assert marks(found, "Losslessness of records") == ["alarm", *[""] * 4]
    assert [row[0] for row in others] == [f"version {number} on a:8000" for number in range(5, 9)]
    assert ("alarms", "1", "alarm") in found["facts"]


def test_damage_is_left_out_and_what_is_no_number_is_not_shown(
    told: Callable, tmp_path: Path
) -> None:
    published(tmp_path)
    published(tmp_path, float("nan"))
    (tmp_path / "v000001" / "manifest.json").write_text("{torn")
    status = {"time_s": time.time() - 5, "loss": float("nan"), "updates": 3}
    (tmp_path / "status.json").write_text(json.dumps(status))
    found = told()
    assert [row[0] for row in cells(found, "Versions")] == ["2 live"]
    (text,) = learner_of(found)
    assert text.startswith("running: 3 updates") and text.endswith("loss -")
    (tmp_path / "status.json").write_text(json.dumps({**status, "stopped": True}))
    (text,) = learner_of(told())
    assert re.match(r"stopped \d+s ago: ", text)
    for torn in ("[1", "[1]", ""):
        (tmp_path / "status.json").write_text(torn)
        assert learner_of(told()) == []
    (tmp_path / "current").write_text("nonsense")
    assert cells(told(), "Versions") == []
