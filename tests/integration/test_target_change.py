"""Other weights of the target: the draft made for the old ones is judged under the new ones, is
withheld where it predicts no more, and learns."""

from __future__ import annotations

import io
import logging
import shutil
import threading
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from draftsmith.distill import command as daemon
from draftsmith.distill.config import GateConfig, LearnConfig
from draftsmith.distill.version_lifecycle import LiveVersion
from draftsmith.drafters import checkpoint, versions
from draftsmith.drafters.target.target import Target
from draftsmith.fleet.rl import PolicyRevisions
from draftsmith.serve.config import EngineConfig
from draftsmith.serve.engine.build import build_engine
from draftsmith.serve.engine.live_draft import PROBE
from draftsmith.serve.engine.loop import EngineLoop
from draftsmith.serve.sampling.params import SamplingParams
from draftsmith.serve.watch import VersionWatcher
from tests.integration.conftest import Loop, learner_of

GREEDY = SamplingParams(max_tokens=24, temperature=0.0, ignore_eos=True)
LEARNING = LearnConfig(lr=1e-4, steps=2, fresh=1000, reservoir=1000)


class Site(Loop):
    """A target's folder, whose weights change, the draft that its first weights make, and what
    server and learner share."""

    def __init__(self, root: Path, first: str):
        self.folder = shutil.copytree(first, str(root / "target"))
        gate = GateConfig(every=1, held_out=0.5)
        super().__init__(root, self.folder, "perfect", learn=LEARNING, gate=gate)

    def change(self, noise: float) -> None:
        """New weights in the target's folder."""
        generator = torch.Generator().manual_seed(1)
        with torch.no_grad():
            for parameter in self.target.model.parameters():
                own = torch.randn(parameter.shape, generator=generator)
                parameter.add_(noise * parameter.std().nan_to_num() * own)
        self.target.model.save_pretrained(self.folder)
        self.target = Target.load(self.folder)

    def serve(self, count: int) -> None:
        self.record(self.root / "draft", self.prompts(count, count), seed=0)

    def revision(self) -> str:
        live = versions.latest(self.config.versions)
        assert live is not None
        return versions.read_manifest(self.config.versions, live)["target"]["revision"]


@pytest.fixture
def site(tmp_path: Path, target_folder: str) -> Site:
    made = Site(tmp_path, target_folder)
    daemon.run(made.config)
    return made


@pytest.mark.long
def test_a_draft_that_predicts_no_more_stays_until_it_has_learned(site: Site) -> None:
    made_for = site.target.revision
    site.change(3.0)
    site.serve(80)
    shutil.copytree(site.config.versions, site.root / "copy")
    config = replace(site.config, learn=LearnConfig(lr=3e-3, steps=60, fresh=8))
    daemon.run(config)
    (noticed,) = site.decisions("quarantine")
    holds = [one["reason"] for one in site.decisions("hold")]
    assert any("quarantine" in reason and "0.3" in reason for reason in holds)
    assert noticed["version"] == versions.latest(config.versions) == 1
    assert made_for in noticed["reason"] and site.target.revision in noticed["reason"]
    assert site.status()["quarantined"]
    # The same candidate, where so little is enough.
    site.config = replace(
        config, versions=str(site.root / "copy"), gate=replace(config.gate, floor=0.015)
    )
    daemon.run(site.config)
    (accepted,) = site.decisions("accept")
    assert accepted["gain"] > 0 and accepted["alpha_candidate"] > 0.015
    assert site.revision() == site.target.revision


@pytest.mark.long
@pytest.mark.parametrize(("noise", "is_close"), [(0.01, True), (3.0, False)])
def test_text_that_is_there_predicts_alpha_under_new_weights_before_any_traffic(
    site: Site, monkeypatch: pytest.MonkeyPatch, noise: float, is_close: bool
) -> None:
    """Not one record comes under the new weights. A draft that still predicts goes on being served
    by the texts of the old ones; the control is one that predicts no more."""
    site.serve(48)
    cycle, changed = daemon.Daemon.cycle, []

    def change_then_cycle(self: daemon.Daemon) -> bool:
        if not changed and self.track.window:
            changed.append((self.target.revision, len(self.track.window), len(self.track.fresh)))
            site.change(noise)
        return cycle(self)

    monkeypatch.setattr(daemon.Daemon, "cycle", change_then_cycle)
    daemon.run(site.config)
    (told,) = site.decisions("target")
    revision, window, fresh = changed[0]
    assert (told["left"], told["target_revision"]) == (revision, site.target.revision)
    assert f"{window} held-out texts" in told["reason"]
    status = site.status()
    # Trained on at the end, under the new weights.
    assert (status["window"], status["texts"]) == (window, fresh) and fresh > 0
    assert status["alpha_predicted"] == told["alpha_predicted"]
    lost = told["alpha_before"] - told["alpha_predicted"]
    if is_close:
        (accepted,) = site.decisions("accept")
        assert abs(lost) < 0.15 and "goes on being served" in accepted["reason"]
        assert site.revision() == site.target.revision
        assert not site.decisions("quarantine")
    else:
        assert lost > 0.3 and not site.decisions("accept") and site.decisions("quarantine")


def test_weights_that_come_faster_than_they_are_read_leave_time_to_learn(
    site: Site, tmp_path: Path
) -> None:
    """A policy writes the next revision while the one before is read."""
    policy = PolicyRevisions(tmp_path / "policy")

    def push(step: int) -> None:
        site.change(0.01)
        policy.write(step, lambda folder: shutil.copytree(site.folder, folder, dirs_exist_ok=True))

    push(1)
    site.serve(16)
    learn = LearnConfig(lr=1e-4, steps=1, fresh=2)
    learner = learner_of(
        replace(site.config, target=str(policy.target), learn=learn), io.StringIO()
    )
    push(2)
    learner.loop(threading.Event())
    assert learner.is_outdated and learner.counters.updates == 1


@pytest.mark.long
def test_rounds_of_earlier_weights_are_texts_and_no_evidence(
    site: Site, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A server that is late goes on under the weights before."""
    late = Target.load(site.folder)
    site.serve(8)
    cycle, changed, evidence = daemon.Daemon.cycle, [], []

    def change_then_cycle(self: daemon.Daemon) -> bool:
        if not changed and self.track.fresh:
            changed.append(True)
            site.change(0.01)
        elif len(changed) == 1 and self.target.revision == site.target.revision:
            changed.append(True)
            new, site.target = site.target, late
            site.serve(10)
            site.target = new
        return cycle(self)

    monkeypatch.setattr(daemon.Daemon, "cycle", change_then_cycle)
    monkeypatch.setattr(LiveVersion, "look_for_drift", lambda self, text: evidence.append(text))
    daemon.run(site.config)
    status = site.status()
    assert status["earlier"] > 0 == status["foreign"] and len(evidence) == 8
    assert status["texts"] + status["window"] == 18 and status["live"] is None


@pytest.mark.long
def test_a_server_in_quarantine_drafts_seldom_until_a_version_for_its_target_is_live(
    site: Site, caplog: pytest.LogCaptureFixture
) -> None:
    site.change(0.01)
    drafter = checkpoint.load(versions.open_version(site.config.versions, 1), site.target)
    engine = build_engine(site.target, drafter, EngineConfig(k=3, seed=0), draft_version="1")
    plain = build_engine(site.target, None, EngineConfig(seed=0)).generate([[5, 6, 7]], GREEDY)
    with caplog.at_level(logging.WARNING):
        watcher = VersionWatcher(EngineLoop(engine), site.config.versions, serving=1)
        (said,) = [one.message for one in caplog.records if "is in quarantine" in one.message]
        assert f"runs {site.target.revision}" in said
        assert [one.tokens for one in engine.generate([[5, 6, 7]], GREEDY)] == [
            one.tokens for one in plain
        ]
        drafted, rounds = engine.stats.rounds_by_k[3], engine.stats.num_rounds
        assert [engine.draft.take_turn() for _ in range(2 * PROBE)].count(True) == 2
        # One that fits neither is no better.
        site.publish(drafter, target={"revision": "another"})
        assert not watcher.look() and "stays out" in caplog.text
    assert rounds and drafted
    site.serve(40)
    versions.rollback(site.config.versions, 1, "a test")
    daemon.run(site.config)
    with_own = versions.latest(site.config.versions)
    swap = engine.draft.prepare(
        str(versions.open_version(site.config.versions, with_own)), str(with_own)
    )
    engine.step()
    assert swap.applied.done() and not engine.draft.quarantined
    assert all(engine.draft.take_turn() for _ in range(2 * PROBE))
