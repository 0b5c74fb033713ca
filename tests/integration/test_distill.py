"""The online loop on a tiny target: serve, learn, publish, swap, roll back. What goes wrong on the
way is in `test_faults.py`."""

from __future__ import annotations

import io
import os
import signal
import subprocess
import threading
import time
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest

from draftsmith.distill import command as daemon
from draftsmith.distill.config import GateConfig, LearnConfig
from draftsmith.distill.daemon import Daemon
from draftsmith.distill.state import StateFolder
from draftsmith.drafters import versions
from draftsmith.drafters.target.target import Target
from draftsmith.errors import UserError
from tests.forked import Forked, cli
from tests.integration.conftest import learner_of
from tests.waiting import wait_until

# One of each other kind of unroll. Medusa learns too, but on this text, which depends on every
# drafted token, too little to be told apart live.
LONG = [pytest.param(family, marks=pytest.mark.long) for family in ("mtp", "draft-lm", "dspark")]


@pytest.mark.parametrize("family", ["eagle3", *LONG])
def test_learning_from_traffic_raises_live_acceptance(
    loop: Callable[..., Any], family: str
) -> None:
    made = loop(family)
    before = made.serve(120 if family == "draft-lm" else 60)
    assert daemon.run(replace(made.config, learn=replace(made.config.learn, steps=40))) == 0
    newest = versions.latest(made.versions)
    assert newest == 2 and versions.read_manifest(made.versions, newest)["gate"]["gain"] > 0
    (accepted,) = made.decisions("accept")
    assert accepted["p_value"] <= accepted["level"]
    assert accepted["requests"] >= made.config.gate.requests
    after = made.serve(
        60, seed=1, version=newest, folder=versions.open_version(made.versions, newest)
    )
    assert after > before + 0.01
    # What the gate foresaw off-policy is what the server then measures.
    assert abs(after - accepted["alpha_candidate"]) < 0.06
    assert daemon.run(made.config) == 0
    assert made.status()["rolled_back"] == 0


def test_a_draft_lm_learns_from_records_alone(
    loop: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The target is neither loaded nor run."""
    made = loop("draft-lm")
    made.serve(16)
    learn = replace(made.config.learn, teacher="recorded", steps=4)
    with monkeypatch.context() as patched:
        patched.setattr(Target, "load", None)
        patched.setattr(Target, "states", None)
        gate = replace(made.config.gate, requests=3)
        assert daemon.run(replace(made.config, learn=learn, gate=gate)) == 0
    status = made.status()
    assert status["teacher"] == "recorded" and status["updates"] >= 1
    positions = status["positions_trained"], status["positions_masked"]
    assert min(positions) > 0
    (first, *_) = made.decisions()
    assert first["requests"] >= 3
    # Totals since the first start.
    assert daemon.run(replace(made.config, learn=learn, gate=gate)) == 0
    status = made.status()
    assert (status["positions_trained"], status["positions_masked"]) == positions


def test_no_more_updates_than_max_updates_are_made(loop: Callable[..., Any]) -> None:
    """Texts that are left over when it is reached are not trained on at the end."""
    made, most = loop(), 2
    made.serve(12)
    learn = replace(made.config.learn, fresh=2, most_fresh=2, steps=1)
    assert daemon.run(replace(made.config, max_updates=most, learn=learn)) == 0
    assert made.status()["updates"] == most and made.status()["fresh"] > 0
    assert daemon.run(replace(made.config, max_updates=most, learn=learn)) == 0
    assert made.status()["updates"] == most


def test_what_is_due_is_told_at_the_start_and_a_mean_of_nothing_is_none(
    loop: Callable[..., Any],
) -> None:
    made, said = loop(), io.StringIO()
    made.sampling = replace(made.sampling, k=0)
    made.record(made.root / "draft", made.prompts(8, 0))
    learn = replace(made.config.learn, fresh=2, steps=1)
    learner = learner_of(replace(made.config, learn=learn), said)
    learner.cycle()
    path = made.versions / versions.DECISIONS
    assert (
        f"the first decision, in {path}, comes at update 1 with 12 requests held out, which takes "
        "about 40 of them\n"
    ) in said.getvalue() and not path.exists()
    assert ", loss none yet\n" in said.getvalue() and "nan" not in said.getvalue()
    assert (
        "next decision at update 1 with 12 requests held out "
        f"(now {len(learner.track.window)}), 0 new texts (an update takes 2), loss"
    ) in said.getvalue()


@pytest.mark.long
def test_a_version_that_is_worse_live_is_rolled_back_to_the_best_before_it(
    loop: Callable[..., Any],
) -> None:
    """Which is not its parent: that is as bad."""
    made = loop("perfect")
    daemon.run(made.config)
    made.shuffle(made.draft)
    for number, parent in ((2, 1), (3, 2), (4, 3)):
        assert made.publish(made.draft, parent=parent) == number
    made.serve(60, version=4, folder=versions.open_version(made.versions, 4))
    daemon.run(replace(made.config, gate=replace(made.config.gate, every=1000)))
    assert versions.latest(made.versions) == 1
    assert made.status()["rolled_back"] == 1 and made.status()["version"] == 1
    (rolled,) = made.decisions("rolled back")
    assert (rolled["left"], rolled["version"]) == (4, 1)
    assert rolled["reason"].startswith("the alpha of version 1 is")
    assert rolled["earlier"]["1"]["gain"] > 0.3 and rolled["earlier"]["3"]["gain"] == 0.0
    assert abs(rolled["served_gap"]) < 0.05
    assert rolled["earlier"]["1"]["evidence"] * made.config.gate.error / 3 >= 1


def test_a_version_chosen_by_hand_is_followed(
    loop: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    made = loop("perfect")
    daemon.run(made.config)
    made.shuffle(made.draft)
    made.publish(made.draft)
    take_in, seen = Daemon.take_in, []

    def choose(self: Daemon) -> bool:
        if not seen:
            versions.rollback(made.versions, 1, "by hand")
        seen.append(self.track.live.version)
        return take_in(self)

    monkeypatch.setattr(Daemon, "take_in", choose)
    daemon.run(made.config)
    assert seen[0] == 2 and seen[-1] == 1 and made.status()["version"] == 1


def test_records_of_another_target_are_left_out(loop: Callable[..., Any], capfd: Any) -> None:
    made = loop()
    own, made.target.revision = made.target.revision, "another"
    made.serve(20)
    daemon.run(made.config)
    status = made.status()
    assert 0 < status["foreign"] == status["records"] and made.decisions() == []
    assert "records of target revision another are left out" in capfd.readouterr().err
    made.target.revision = own
    made.serve(4, seed=4)
    daemon.run(replace(made.config, learn=replace(made.config.learn, steps=1)))
    assert made.status()["foreign"] == status["foreign"] < made.status()["records"]


def test_a_closed_terminal_saves_and_stops(
    monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    before = signal.getsignal(signal.SIGHUP)
    for given, stops in ((signal.SIG_DFL, True), (signal.SIG_IGN, False)):
        monkeypatch.setattr(signal, "getsignal", lambda number, given=given: given)
        signal.signal(signal.SIGHUP, signal.SIG_IGN)
        stop = threading.Event()
        with daemon.stopping(stop):
            os.kill(os.getpid(), signal.SIGHUP)
        assert stop.is_set() == stops
        assert ("stopping after the work in hand" in capfd.readouterr().err) == stops
    signal.signal(signal.SIGHUP, before)


@pytest.mark.long
def test_sigterm_ends_the_command_cleanly(loop: Callable[..., Any]) -> None:
    made = loop()
    made.serve(40)
    command = cli("distill", "--target", made.config.target, "--draft", made.config.draft)
    command += ["--buffer", made.config.buffer, "--versions", str(made.versions), "learn.fresh=8"]
    with Forked(command, stderr=subprocess.PIPE) as process:
        wait_until((made.versions / "status.json").exists)
        time.sleep(0.5)
        process.send_signal(signal.SIGTERM)
        _, errors = process.communicate(timeout=30)
    assert process.returncode == 0, errors
    assert "stopped after" in errors and "Traceback" not in errors
    assert StateFolder(made.versions).numbers()


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"gate": GateConfig(held_out=0.0)}, "gate.held_out"),
        ({"draft": "/nowhere/draft"}, "/nowhere/draft"),
        ({"buffer": "nowhere://x"}, "nowhere://x"),
        ({"learn": LearnConfig(positions=())}, "learn.positions"),
    ],
)
def test_bad_options_are_one_sentence(loop: Callable[..., Any], changes: dict, says: str) -> None:
    with pytest.raises(UserError, match=says):
        daemon.run(replace(loop().config, **changes))
