"""What the dashboard tells of learning, from files that may be absent, torn or damaged."""

from __future__ import annotations

import json
import time
from pathlib import Path

from draftsmith.drafters.published.pool import DraftPool, write_pool
from draftsmith.drafters.published.versions import publish, record_decision, rollback
from draftsmith.serve.dashboard.learning import DECISIONS_SHOWN, VERSIONS_SHOWN, Learning

NOTHING = {"versions": [], "decisions": [], "alarms": [], "learner": None, "buffer": None}


def published(root: Path, gain: float | None = 0.01) -> int:
    def save(folder: Path) -> None:
        (folder / "model.safetensors").write_bytes(b"weights")

    return publish(
        root,
        save,
        family="eagle3",
        target={},
        parent=None,
        data_range={},
        gate={"gain": gain, "reason": "a gain"},
    )


def test_a_server_that_does_not_learn_has_nothing_to_tell(tmp_path: Path) -> None:
    assert Learning().read() == NOTHING
    assert Learning(str(tmp_path / "none"), str(tmp_path / "none")).read() == NOTHING | {
        "buffer": {"shards": 0, "bytes": 0}
    }
    assert Learning(None, "memory://buffer").read() == NOTHING


def test_versions_carry_their_gate_and_the_live_one_is_marked(tmp_path: Path) -> None:
    learning = Learning(str(tmp_path))
    assert [published(tmp_path, gain) for gain in (0.01, 0.02)] == [1, 2]
    told = learning.read()["versions"]
    assert [(one["version"], one["gate"]["gain"], one["live"]) for one in told] == [
        (1, 0.01, False),
        (2, 0.02, True),
    ]
    rollback(tmp_path, 1, "it is worse")
    told = learning.read()
    assert [one["live"] for one in told["versions"]] == [True, False]
    assert [one["reason"] for one in told["alarms"]] == ["it is worse"]


def test_only_the_newest_are_told(tmp_path: Path) -> None:
    for _ in range(VERSIONS_SHOWN + 3):
        published(tmp_path)
    for number in range(DECISIONS_SHOWN + 5):
        record_decision(tmp_path, {"decision": "hold", "number": number})
    told = Learning(str(tmp_path)).read()
    assert (
        told["versions"][-1]["version"] == VERSIONS_SHOWN + 3
        and len(told["versions"]) == VERSIONS_SHOWN
    )
    assert (
        told["decisions"][-1]["number"] == DECISIONS_SHOWN + 4
        and len(told["decisions"]) == DECISIONS_SHOWN
    )


def test_new_decisions_are_seen_and_alarms_are_those_an_operator_looks_at(tmp_path: Path) -> None:
    learning = Learning(str(tmp_path))
    assert learning.read()["decisions"] == []
    for decision in ("accept", "hold", "refuse", "rolled back", "drift"):
        record_decision(tmp_path, {"decision": decision})
        assert learning.read()["decisions"][-1]["decision"] == decision
    assert [one["decision"] for one in learning.read()["alarms"]] == [
        "refuse",
        "rolled back",
        "drift",
    ]


def test_decisions_about_a_class_are_told_with_its_name_in_their_turn(tmp_path: Path) -> None:
    learning = Learning(str(tmp_path))
    pool = tmp_path / "pool"
    write_pool(tmp_path, DraftPool({"code": "c01"}, {"prose": "c02"}))
    record_decision(tmp_path, {"decision": "new class", "class": "code"})
    record_decision(pool / "c01", {"decision": "rolled back"})
    record_decision(tmp_path, {"decision": "hold"})
    for _ in range(2):
        record_decision(pool / "c02", {"decision": "accept"})
        told = learning.read()
    names = [(one["decision"], one.get("class")) for one in told["decisions"]]
    assert names == [
        ("new class", "code"),
        ("rolled back", "code"),
        ("hold", None),
        ("accept", "prose"),
        ("accept", "prose"),
    ]
    assert [one["class"] for one in told["alarms"]] == ["code"]
    for number in range(DECISIONS_SHOWN):
        record_decision(pool / "c01", {"decision": "hold", "number": number})
    assert [one["number"] for one in learning.read()["decisions"]] == list(range(DECISIONS_SHOWN))
    write_pool(tmp_path, DraftPool())
    assert len(learning.read()["decisions"]) == 2, (
        "a class that lost its draft has told all it had to"
    )


def test_damage_is_left_out_and_numbers_that_json_lacks_become_null(tmp_path: Path) -> None:
    published(tmp_path)
    published(tmp_path)
    (tmp_path / "v000001" / "manifest.json").write_text("{torn")
    (tmp_path / "status.json").write_text(
        json.dumps({"time_s": time.time() - 5, "loss": float("nan"), "updates": 3})
    )
    learning = Learning(str(tmp_path))
    told = learning.read()
    assert [one["version"] for one in told["versions"]] == [2]
    assert (
        told["learner"]["loss"] is None
        and told["learner"]["updates"] == 3
        and 4 < told["learner"]["age_s"] < 60
    )
    json.dumps(told, allow_nan=False)
    for torn in ("[1", "[1]", ""):
        (tmp_path / "status.json").write_text(torn)
        assert learning.read()["learner"] is None
    (tmp_path / "current").write_text("nonsense")
    assert learning.read()["versions"] == []


def test_the_buffer_is_measured_and_not_at_every_look(tmp_path: Path) -> None:
    (tmp_path / "1-a-0.parquet").write_bytes(b"12345")
    (tmp_path / "other.txt").write_bytes(b"12345")
    learning = Learning(None, str(tmp_path))
    assert learning.read()["buffer"] == {"shards": 1, "bytes": 5}
    (tmp_path / "2-a-0.parquet").write_bytes(b"123")
    assert learning.read()["buffer"]["shards"] == 1
    assert Learning(None, str(tmp_path)).read()["buffer"] == {"shards": 2, "bytes": 8}
