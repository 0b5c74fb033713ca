"""The daemon rests when it finds nothing better, and is woken by a class that is accepted less;
both are told."""

from __future__ import annotations

import io
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from draftsmith.distill.buffer import buffer
from draftsmith.distill.buffer.folder import ShardFolder
from draftsmith.distill.buffer.traffic import ServedText
from draftsmith.distill.config import DriftConfig, GateConfig, LearnConfig
from draftsmith.distill.gate.drift import BASELINE
from draftsmith.distill.gate.gate import Decision
from tests.integration.conftest import learner_of
from tests.round_records import round_record, served_text


def served(number: int, accepted: int, name: str) -> ServedText:
    record = round_record(
        request=f"{name}{number}", request_class=name, time_s=3.6 * number, position=4,
        context=[5, 6, 7, 8 + number % 200],
        drafted=[9, 9, 9, 9], accepted=accepted, committed=[9] * accepted + [11],
    )  # fmt: skip
    return served_text([record])


def test_learning_rests_without_gains_and_is_woken_by_drift(
    loop: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    made, told = loop(), io.StringIO()
    learn, drift = LearnConfig(fresh=4, steps=1), DriftConfig(patience=3)
    config = replace(made.config, learn=learn, gate=GateConfig(), drift=drift)
    daemon = learner_of(config, told)
    for number in range(BASELINE):
        daemon.sort_in(served(number, 3, "code"))
        daemon.sort_in(served(number, 3, "chat"))
    for _ in range(3):
        daemon.track.lifecycle.record(Decision("hold", "no gain"))
    assert "learning rests" in told.getvalue()
    before = {
        name: value.clone() for name, value in daemon.track.learner.drafter.state_dict().items()
    }
    assert len(daemon.track.fresh) > 4
    daemon.cycle()
    assert daemon.counters.updates == 0 and daemon.status.values["resting"]
    after = daemon.track.learner.drafter.state_dict()
    assert all(torch.equal(value, before[name]) for name, value in after.items())

    for number in range(BASELINE, BASELINE + 40):
        daemon.sort_in(served(number, 3, "chat"))
        daemon.sort_in(served(number, 0, "code"))
    (alarm,) = made.decisions("drift")
    assert alarm["request_class"] == "code" and alarm["now"] < alarm["level"]
    assert "drift: class 'code'" in told.getvalue()
    with monkeypatch.context() as owing:
        listed: list[str] = []
        owing.setattr(daemon.throttle, "pay", lambda: False)
        owing.setattr(ShardFolder, "names", lambda self: listed.append(self.url) or {})
        assert daemon.cycle() and daemon.counters.updates == 0, (
            "what was done before is rested for first"
        )
        assert listed == [config.buffer], "a store charges for every listing"
    daemon.cycle()
    assert daemon.counters.updates == 1 and daemon.counters.drift_alarms == 1
    assert not daemon.status.values["resting"]
    # its beginning never comes
    daemon.open.add([replace(served(0, 1, "code").records[0], round=1)])
    daemon.finish()
    daemon.save()
    again = learner_of(config, told)
    again.cycle()
    assert again.counters == daemon.counters
    assert again.counters.drift_alarms == again.counters.orphans == 1
    assert again.track.live.ledger == daemon.track.live.ledger
    assert str(again.track.live.drift.kept()) == str(daemon.track.live.drift.kept())

    made.publish(made.draft)
    for mark in Path(config.buffer).glob("reader-*.json"):
        mark.unlink()
    monkeypatch.setattr(buffer, "LOOK_S", 0.0)
    again.throttle.look_up()
    assert list(Path(config.buffer).glob("reader-*.json")), (
        "servers would take a learner that rests as gone"
    )
    assert again.track.live.version == again.status.values["version"] == 2, (
        "chosen while an update rests"
    )
