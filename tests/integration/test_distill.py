"""The online loop on a tiny target: serve, learn, publish, swap, roll back; and every way of being interrupted."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from draftsmith.distill import daemon
from draftsmith.distill.buffer import BufferReader, BufferWriter
from draftsmith.distill.config import DistillConfig, GateConfig, LearnConfig
from draftsmith.distill.learner import Learner, UpdateReport
from draftsmith.distill.lock import learner_lock
from draftsmith.distill.loop import Daemon
from draftsmith.distill.state import StateFolder
from draftsmith.drafters import checkpoint, versions
from draftsmith.drafters.options import OPTIONS as DEFAULTS
from draftsmith.drafters.options import DraftLmOptions, LoraOptions
from draftsmith.drafters.registry import FAMILIES
from draftsmith.drafters.target import Target
from draftsmith.errors import UserError
from draftsmith.serve.config import EngineConfig
from draftsmith.serve.engine import Engine
from draftsmith.serve.request import SamplingParams

OPTIONS = {name: options() for name, options in DEFAULTS.items()} | {"draft-lm": DraftLmOptions(num_layers=1, hidden_size=32)}
LEARN = LearnConfig(lr=3e-3, steps=20, fresh=16, unroll=3)
GATE = GateConfig(every=1, held_out=0.3)
# Text of a tiny random target is unlike language; at this temperature its laws fit into 64 tokens.
SAMPLING = SamplingParams(max_tokens=16, temperature=0.5)


def prompts(count: int, seed: int) -> list[list[int]]:
    return torch.randint(3, 288, (count, 6), generator=torch.Generator().manual_seed(seed)).tolist()


class Loop:
    """A target, a draft and the three folders between server and learner."""

    def __init__(self, root: Path, target: str, family: str):
        """Family "perfect" is the target drafting for itself: what is done to it can only be harm."""
        self.root = root
        self.target = Target.load(target)
        options = DraftLmOptions(init=target) if family == "perfect" else OPTIONS[family]
        self.draft = FAMILIES["draft-lm" if family == "perfect" else family].create(options, self.target, seed=0)
        checkpoint.save(self.draft, root / "draft", self.target)
        self.config = DistillConfig(
            target=target, draft=str(root / "draft"), buffer=str(root / "buffer"), versions=str(root / "versions"),
            until_idle_s=0.3, idle_s=0.1, poll_s=0.05, learn=LEARN, gate=GATE,
        )  # fmt: skip

    @property
    def versions(self) -> Path:
        return self.root / "versions"

    def serve(self, count: int, *, seed: int = 0, version: int = 1, folder: Path | None = None) -> float:
        """Accepted share of the offered tokens. `folder` is served under the name of `version`."""
        drafter = checkpoint.load(folder or self.root / "draft", self.target)
        writer = BufferWriter(self.config.buffer, flush_s=60.0, flush_records=10**6)
        engine = Engine(self.target, drafter, EngineConfig(k=3, seed=seed), sink=writer, draft_version=str(version))
        engine.generate(prompts(count, seed), SAMPLING, text=False)
        writer.close()
        records = [
            one for one in BufferReader(self.config.buffer).read(max_records=10**6).records if one.draft_version == str(version)
        ]
        accepted = sum(one.accepted for one in records)
        return accepted / sum(min(one.accepted + 1, len(one.drafted)) for one in records)

    def decisions(self) -> list[dict[str, Any]]:
        return versions.read_decisions(self.versions)

    def status(self) -> dict[str, Any]:
        return json.loads((self.versions / "status.json").read_text())


@pytest.fixture
def loop(tmp_path: Path, tiny_target: Callable[..., str]) -> Callable[..., Loop]:
    return lambda family="mtp": Loop(tmp_path, tiny_target("llama"), family)


# Medusa learns too, but on this text, which depends on every drafted token, too little to be told apart live.
LONG = [pytest.param(family, marks=pytest.mark.long) for family in DEFAULTS if family not in ("eagle3", "medusa")]


@pytest.mark.parametrize("family", ["eagle3", *LONG])
def test_learning_from_traffic_raises_live_acceptance(loop: Callable[..., Loop], family: str) -> None:
    made = loop(family)
    before = made.serve(120 if family == "draft-lm" else 60)
    assert daemon.run(replace(made.config, learn=replace(LEARN, steps=40))) == 0
    newest = versions.latest(made.versions)
    assert newest == 2 and versions.read_manifest(made.versions, newest)["gate"]["gain"] > 0
    (accepted,) = [one for one in made.decisions() if one["decision"] == "accept"]
    assert accepted["p_value"] <= accepted["level"] and accepted["requests"] >= GATE.requests
    after = made.serve(60, seed=1, version=newest, folder=versions.open_version(made.versions, newest))
    assert after > before + 0.01
    # What the gate foresaw off-policy is what the server then measures.
    assert abs(after - accepted["alpha_candidate"]) < 0.06
    assert daemon.run(made.config) == 0
    assert made.status()["rolled_back"] == 0


def test_running_engine_takes_a_published_version(loop: Callable[..., Loop]) -> None:
    made = loop()
    made.serve(60)
    daemon.run(made.config)
    newest = versions.latest(made.versions)
    drafter = checkpoint.load(versions.open_version(made.versions, 1), made.target)
    engine = Engine(made.target, drafter, EngineConfig(k=3), draft_version="1")
    engine.swap(str(versions.open_version(made.versions, newest)), str(newest))
    engine.generate(prompts(2, 3), SAMPLING, text=False)
    assert engine.stats.draft_version == str(newest)
    published = checkpoint.load(versions.open_version(made.versions, newest), made.target)
    assert all(torch.equal(a, b) for a, b in zip(drafter.state_dict().values(), published.state_dict().values(), strict=True))


@pytest.mark.parametrize("harm", ["too high a learning rate", "shuffled weights", "NaN"])
def test_candidates_that_do_not_help_are_not_published(
    loop: Callable[..., Loop], monkeypatch: pytest.MonkeyPatch, harm: str
) -> None:
    made = loop("perfect")
    made.serve(60)
    config = replace(made.config, learn=replace(LEARN, steps=3, lr=3.0 if harm.startswith("too") else 1e-5))
    update = Learner.update

    def harmful(self: Learner, fresh: list, rest: Callable[[float], None]) -> UpdateReport:
        report = update(self, fresh, rest)
        if harm == "shuffled weights":
            shuffle(self.drafter)
        elif harm == "NaN":
            with torch.no_grad():
                next(self.drafter.parameters())[0] = float("nan")
        return report

    monkeypatch.setattr(Learner, "update", harmful)
    daemon.run(config)
    assert versions.versions(made.versions) == [1] and versions.latest(made.versions) == 1
    assert {one["decision"] for one in made.decisions()} == ({"refuse"} if harm == "NaN" else {"hold"})
    # The candidate is the live draft again.
    candidate = final_state(made.versions)["candidate"]
    for name, parameter in made.draft.named_parameters():
        torch.testing.assert_close(candidate[name], parameter, rtol=0, atol=0)


def shuffle(drafter: torch.nn.Module) -> None:
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for parameter in drafter.parameters():
            order = torch.randperm(parameter.numel(), generator=generator)
            parameter.copy_(parameter.flatten()[order].view_as(parameter))


def publish_by_hand(made: Loop, drafter: torch.nn.Module) -> int:
    return versions.publish(
        made.versions, lambda folder: checkpoint.save(drafter, folder, made.target), family="draft-lm", target={}, parent=1,
        data_range={}, gate={"reason": "by hand"},
    )  # fmt: skip


def test_a_version_that_is_worse_live_is_rolled_back(loop: Callable[..., Loop]) -> None:
    made = loop("perfect")
    daemon.run(made.config)
    shuffle(made.draft)
    assert publish_by_hand(made, made.draft) == 2
    made.serve(60, version=2, folder=versions.open_version(made.versions, 2))
    daemon.run(replace(made.config, gate=replace(GATE, every=1000)))
    assert versions.latest(made.versions) == 1
    assert made.status()["rolled_back"] == 1 and made.status()["version"] == 1
    (rolled,) = [one for one in made.decisions() if one["decision"] == "rolled back"]
    assert rolled["left"] == 2 and rolled["parent_gain"] > 0.3 and abs(rolled["served_gap"]) < 0.05


def test_a_version_served_with_other_weights_is_rolled_back(loop: Callable[..., Loop]) -> None:
    """The folder is good, what runs under its name is not: only real acceptance can tell."""
    made = loop("perfect")
    daemon.run(made.config)
    assert publish_by_hand(made, made.draft) == 2
    shuffle(made.draft)
    checkpoint.save(made.draft, made.root / "noise", made.target)
    made.serve(60, version=2, folder=made.root / "noise")
    daemon.run(replace(made.config, gate=replace(GATE, every=1000)))
    assert versions.latest(made.versions) == 1
    (rolled,) = [one for one in made.decisions() if one["decision"] == "rolled back"]
    assert rolled["served_gap"] > 0.3 and rolled["parent_gain"] == 0.0


def test_a_good_version_stays(loop: Callable[..., Loop]) -> None:
    """The same watch over a version that is no worse than its parent: no false alarm."""
    made = loop("perfect")
    daemon.run(made.config)
    assert publish_by_hand(made, made.draft) == 2
    made.serve(60, version=2)
    daemon.run(replace(made.config, gate=replace(GATE, every=1000)))
    assert versions.latest(made.versions) == 2
    assert made.status()["live"]["requests"] >= GATE.requests and made.status()["rolled_back"] == 0


def test_a_version_chosen_by_hand_is_followed(loop: Callable[..., Loop], monkeypatch: pytest.MonkeyPatch) -> None:
    made = loop("perfect")
    daemon.run(made.config)
    shuffle(made.draft)
    publish_by_hand(made, made.draft)
    take_in, seen = Daemon.take_in, []

    def choose(self: Daemon) -> bool:
        if not seen:
            versions.rollback(made.versions, 1, "by hand")
        seen.append(self.publisher.version)
        return take_in(self)

    monkeypatch.setattr(Daemon, "take_in", choose)
    daemon.run(made.config)
    assert seen[0] == 2 and seen[-1] == 1 and made.status()["version"] == 1


def test_records_of_another_target_are_left_out(loop: Callable[..., Loop], tiny_target: Callable[..., str]) -> None:
    made = loop()
    made.serve(30)
    made.target.revision = "another"
    made.serve(10, seed=4)
    daemon.run(made.config)
    status = made.status()
    assert 0 < status["foreign"] < status["records"]


def test_two_learners_are_refused_and_a_dead_ones_lock_is_taken_over(loop: Callable[..., Loop]) -> None:
    made = loop()
    made.serve(2)
    with learner_lock(made.versions), pytest.raises(UserError, match=f"process {os.getpid()}"):
        daemon.run(made.config)
    holder = "import sys, os; from draftsmith.distill.lock import *\nwith learner_lock(sys.argv[1]): os.kill(os.getpid(), 9)"
    assert subprocess.run([sys.executable, "-c", holder, str(made.versions)]).returncode == -9
    assert daemon.run(made.config) == 0


def test_full_disk_is_waited_out(
    loop: Callable[..., Loop], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture
) -> None:
    made = loop()
    made.serve(60)
    save, failures = StateFolder.save, []

    def refuse_twice(self: StateFolder, *args: Any, **values: Any) -> None:
        if len(failures) < 2:
            failures.append(1)
            raise OSError(28, "No space left on device")
        save(self, *args, **values)

    monkeypatch.setattr(StateFolder, "save", refuse_twice)
    daemon.run(made.config)
    assert "No space left" in capsys.readouterr().err and len(failures) == 2
    assert StateFolder(made.versions).numbers()


def test_damaged_state_and_damaged_live_version_do_not_stop_the_learner(loop: Callable[..., Loop]) -> None:
    made = loop()
    made.serve(60)
    daemon.run(made.config)
    (number,) = StateFolder(made.versions).numbers()
    (made.versions / "learner" / f"state-{number:08d}" / "optimizer.safetensors").write_bytes(b"torn")
    (versions.folder_of(made.versions, 2) / "model.safetensors").write_bytes(b"torn")
    assert daemon.run(made.config) == 0
    assert versions.open_version(made.versions, versions.latest(made.versions))
    assert any(one["decision"] == "rollback" and one["left"] == 2 for one in made.decisions())


RUN = """
import os, sys
from draftsmith.config import build
from draftsmith.distill import daemon
from draftsmith.distill.buffer import BufferReader
from draftsmith.distill.config import DistillConfig
from draftsmith.distill.state import StateFolder
import json
from draftsmith.distill import state
point, when = int(sys.argv[2]), sys.argv[3]
# One shard a cycle, each holding whole requests: what is learned then depends on the records alone, not on the clock.
read, saves = BufferReader.read, 0
BufferReader.read = lambda self: read(self, max_records=1)
save = StateFolder.save
def counted(self, *args, **values):
    global saves
    saves += 1
    if saves == point and when == "before":
        os.kill(os.getpid(), 9)
    if saves == point and when == "amid":
        state.pq.write_table = lambda *_, **__: os.kill(os.getpid(), 9)  # the tensors are on disk, the records are not
    save(self, *args, **values)
    if saves == point and when == "after":
        os.kill(os.getpid(), 9)
StateFolder.save = counted
daemon.run(build(DistillConfig, json.loads(sys.argv[1])))
"""


def learn_in_steps(made: Loop, root: Path, point: int, when: str) -> subprocess.CompletedProcess:
    values = {
        "target": made.config.target, "draft": made.config.draft, "buffer": made.config.buffer, "versions": str(root),
        "idle_s": 0.0, "until_idle_s": 0.5, "poll_s": 0.05, "save_s": 0.0,
        "learn": {"lr": 1e-3, "steps": 2, "fresh": 3, "unroll": 2, "batch": 4, "reservoir": 8},
        "gate": {"every": 3, "held_out": 0.3},
    }  # fmt: skip
    return subprocess.run([sys.executable, "-c", RUN, json.dumps(values), str(point), when], capture_output=True, text=True)


@pytest.mark.parametrize(
    ("point", "when"), [(3, "amid"), *(pytest.param(*one, marks=pytest.mark.long) for one in ((3, "after"), (2, "before")))]
)
def test_killed_learner_goes_on_without_repeating_or_losing_a_record(loop: Callable[..., Loop], point: int, when: str) -> None:
    made = loop()
    for wave in range(6):
        made.serve(5, seed=wave)
        time.sleep(0.002)
    whole = learn_in_steps(made, made.root / "whole", 0, "never")
    assert whole.returncode == 0, whole.stderr
    killed = learn_in_steps(made, made.root / "cut", point, when)
    assert killed.returncode == -9, killed.stderr
    assert learn_in_steps(made, made.root / "cut", 0, "never").returncode == 0
    state, reference = final_state(made.root / "cut"), final_state(made.root / "whole")
    assert state["counters"] == reference["counters"] and state["cursor"] == reference["cursor"]
    assert state["counters"]["updates"] >= 3 and state["counters"]["orphans"] == 0
    for name, value in reference["candidate"].items():
        torch.testing.assert_close(state["candidate"][name], value, rtol=0, atol=0)
    decisions = [[one["decision"] for one in versions.read_decisions(made.root / name)] for name in ("cut", "whole")]
    assert decisions[0] == decisions[1] and decisions[0]


def test_adapters_are_published_merged_and_survive_a_restart(loop: Callable[..., Loop]) -> None:
    made = loop("draft-lm")
    made.serve(100)
    config = replace(made.config, learn=replace(LEARN, lr=1e-2, steps=30, lora=LoraOptions(rank=8)))
    daemon.run(replace(config, gate=replace(GATE, error=0.4, gain=0.0)))
    (accepted,) = [one for one in made.decisions() if one["decision"] == "accept"]
    assert accepted["gain"] > 0
    published = versions.open_version(made.versions, 2)
    assert not any("lora" in name for name in load_file(published / "model.safetensors"))
    assert all("lora_" in name for name in final_state(made.versions)["candidate"])
    made.serve(20, seed=1, version=2, folder=published)
    daemon.run(config)
    assert made.status()["updates"] == 2


@pytest.mark.parametrize("jump_s", [-(10**6), pytest.param(10**9, marks=pytest.mark.long)])
def test_a_clock_that_jumps_changes_nothing_that_is_learned(
    loop: Callable[..., Loop], monkeypatch: pytest.MonkeyPatch, jump_s: float
) -> None:
    made = loop()
    made.serve(40)
    daemon.run(replace(made.config, versions=str(made.root / "steady")))
    now_s = time.time
    monkeypatch.setattr(time, "time", lambda: now_s() + jump_s)
    daemon.run(made.config)
    jumped, steady = final_state(made.versions), final_state(made.root / "steady")
    assert jumped["counters"] == steady["counters"] and jumped["counters"]["updates"] > 0
    for name, value in steady["candidate"].items():
        torch.testing.assert_close(jumped["candidate"][name], value, rtol=0, atol=0)


def test_a_closed_terminal_saves_and_stops(monkeypatch: pytest.MonkeyPatch) -> None:
    before = signal.getsignal(signal.SIGHUP)
    for given, stops in ((signal.SIG_DFL, True), (signal.SIG_IGN, False)):
        monkeypatch.setattr(signal, "getsignal", lambda number, given=given: given)
        signal.signal(signal.SIGHUP, signal.SIG_IGN)
        stop = threading.Event()
        with daemon.stopping(stop):
            os.kill(os.getpid(), signal.SIGHUP)
        assert stop.is_set() == stops
    signal.signal(signal.SIGHUP, before)


def final_state(root: Path) -> dict[str, Any]:
    folder = root / "learner" / f"state-{StateFolder(root).numbers()[-1]:08d}"
    return json.loads((folder / "state.json").read_text()) | {"candidate": load_file(folder / "candidate.safetensors")}


def test_sigterm_ends_the_command_cleanly(loop: Callable[..., Loop]) -> None:
    made = loop()
    made.serve(40)
    command = [sys.executable, "-m", "draftsmith.cli", "distill", "--target", made.config.target, "--draft", made.config.draft]
    command += ["--buffer", made.config.buffer, "--versions", str(made.versions), "learn.fresh=8", "idle_s=0.1"]
    with subprocess.Popen(command, stderr=subprocess.PIPE, text=True) as process:
        deadline_s = time.monotonic() + 60
        while time.monotonic() < deadline_s and not (made.versions / "status.json").exists():
            time.sleep(0.05)
        time.sleep(1.0)
        process.send_signal(signal.SIGTERM)
        _, errors = process.communicate(timeout=30)
    assert process.returncode == 0, errors
    assert "stopped after" in errors and "Traceback" not in errors
    assert StateFolder(made.versions).numbers()


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"gate": GateConfig(requests=50, window=10)}, "gate.window"),
        ({"gate": GateConfig(held_out=0.0)}, "gate.held_out"),
        ({"draft": "/nowhere/draft"}, "/nowhere/draft"),
        ({"buffer": "nowhere://x"}, "nowhere://x"),
        ({"learn": LearnConfig(positions=("all",))}, "learn.positions"),
        ({"learn": LearnConfig(lora=LoraOptions())}, "learn.lora"),
        ({"tpot_ms": 20.0}, "server and tpot_ms"),
        ({"server": "localhost", "tpot_ms": 20.0}, "localhost"),
    ],
)
def test_bad_options_are_one_sentence(loop: Callable[..., Loop], changes: dict, says: str) -> None:
    with pytest.raises(UserError, match=says):
        daemon.run(replace(loop().config, **changes))
