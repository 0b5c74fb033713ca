"""Everything that can go wrong between server and learner: nothing is lost, nothing wrong goes
live, one clear line is said.

Elsewhere: rollbacks in `test_distill.py`; damaged shards, hanging disks and killed writers in
`test_buffer*.py`; kills at every file operation of a publication in `test_versions.py`; corrupt
versions in a server in `test_swap.py`.
"""

from __future__ import annotations

import dataclasses
import errno
import json
import os
import shutil
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

from draftsmith import files
from draftsmith.distill import command as daemon
from draftsmith.distill import draft_track
from draftsmith.distill.buffer.buffer import BufferReader, BufferReading, BufferWriter
from draftsmith.distill.buffer.folder import ShardFolder, retain
from draftsmith.distill.buffer.traffic import SILENCE_S
from draftsmith.distill.gate.gate import Decision
from draftsmith.distill.learn.learner import Learner, UpdateReport
from draftsmith.distill.publisher import Publisher
from draftsmith.distill.state import StateFolder
from draftsmith.distill.status import Status
from draftsmith.distill.throttle import Throttle
from draftsmith.drafters import versions
from draftsmith.drafters.text.suffix import Suffix
from draftsmith.errors import UserError
from draftsmith.lock import folder_lock
from draftsmith.record import RoundRecord
from draftsmith.serve.config import EngineConfig
from draftsmith.serve.engine.build import build_engine
from tests import forked

FULL = OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


def failing(times: int, work: Callable[..., Any]) -> Callable[..., Any]:
    """`work` on a disk that is full for its first `times` calls; `calls` of it counts them."""

    def tried(*args: Any, **values: Any) -> Any:
        tried.calls += 1  # type: ignore[attr-defined]
        if tried.calls <= times:  # type: ignore[attr-defined]
            raise FULL
        return work(*args, **values)

    tried.calls = 0  # type: ignore[attr-defined]
    return tried


# Bad updates. Whatever else is worse is blocked in `test_updates_judged.py`.


@pytest.mark.long
def test_an_update_without_numbers_is_not_published(
    loop: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    made = loop("perfect")
    made.serve(60)
    config = replace(made.config, learn=replace(made.config.learn, steps=6, lr=1e-5))
    update = Learner.update

    def harmed(self: Learner, fresh: list, rest: Callable[[float], None]) -> UpdateReport:
        report = update(self, fresh, rest)
        with self.averaged() as judged, torch.no_grad():
            next(judged.parameters())[0] = float("nan")
        return report

    monkeypatch.setattr(Learner, "update", harmed)
    daemon.run(config)
    assert versions.versions(made.versions) == [1] and versions.latest(made.versions) == 1
    (decision,) = made.decisions()
    assert decision["decision"] == "refuse" and decision["reason"]
    # The candidate is the live draft again.
    candidate = made.state()["candidate"]
    for name, parameter in made.draft.named_parameters():
        torch.testing.assert_close(candidate[name], parameter, rtol=0, atol=0)
    # Past the gate it is refused a second time, as it is read back.
    accepted = Decision("accept", "nobody looked")
    monkeypatch.setattr(draft_track, "decide", lambda *args, **values: accepted)
    ungated = made.root / "ungated"
    daemon.run(replace(config, versions=str(ungated)))
    assert versions.latest(ungated) == 1
    assert "cannot be read back" in versions.read_decisions(ungated)[0]["reason"]


# Disks.


def test_answers_do_not_depend_on_the_buffers_disk(
    loop: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    made = loop()

    def answers(buffer: Path) -> tuple[list[list[int]], BufferWriter]:
        writer = BufferWriter(str(buffer), flush_s=0.01)
        engine = build_engine(made.target, Suffix(), EngineConfig(k=3, seed=1), sink=writer)
        done = engine.generate(made.prompts(20, 5), made.sampling, text=False)
        writer.close()
        return [one.tokens for one in done], writer

    good, stored = answers(made.root / "good")
    monkeypatch.setattr(files.os, "replace", failing(10**9, os.replace))
    bad, lost = answers(made.root / "full")
    assert bad == good and stored.written > 50 and stored.dropped == 0
    assert lost.written == 0 and lost.dropped == stored.written
    assert not list((made.root / "full").iterdir())


@pytest.mark.long
def test_a_full_disk_is_waited_out(
    loop: Callable[..., Any], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture
) -> None:
    """Whatever the learner writes is refused twice: its state, a version, a decision,
    its status."""
    made = loop()
    made.serve(60)
    places = (
        (StateFolder, "save"),
        (Publisher, "publish"),
        (versions, "record_decision"),
        (daemon.Status, "show"),
    )
    refused = [failing(2, vars(owner)[name]) for owner, name in places]
    for (owner, name), tried in zip(places, refused):
        again = lambda *args, tried=tried, **values: tried(*args, **values)  # noqa: E731
        monkeypatch.setattr(owner, name, again)
    daemon.run(made.config)
    said = capsys.readouterr().err
    assert all(tried.calls > 2 for tried in refused), (
        "the control: each was refused and came through"
    )
    assert "No space left on device; trying again" in said and "decisions wait to be logged" in said
    assert "Traceback" not in said
    # As if nothing had happened.
    monkeypatch.undo()
    daemon.run(replace(made.config, versions=str(made.root / "roomy")))
    assert versions.versions(made.versions) == versions.versions(made.root / "roomy") == [1, 2]
    assert [one["decision"] for one in made.decisions()] == ["accept"]
    told, roomy = made.state(), made.state(made.root / "roomy")
    assert told["counters"] == roomy["counters"] and told["cursor"] == roomy["cursor"]
    for name, value in roomy["candidate"].items():
        torch.testing.assert_close(told["candidate"][name], value, rtol=0, atol=0)


def test_a_disk_that_is_full_from_the_start_is_one_sentence(
    loop: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    made = loop()
    monkeypatch.setattr(versions, "publish", failing(1, versions.publish))
    with pytest.raises(UserError, match=r"the learner cannot begin \(.*No space left on device\)"):
        daemon.run(made.config)
    assert daemon.run(made.config) == 0 and versions.versions(made.versions) == [1]


@pytest.mark.long
def test_damaged_state_and_damaged_live_version_do_not_stop_the_learner(
    loop: Callable[..., Any],
) -> None:
    made = loop()
    made.serve(60)
    daemon.run(made.config)
    (number,) = StateFolder(made.versions).numbers()
    state = made.versions / "learner" / f"state-{number:08d}"
    (state / "optimizer.safetensors").write_bytes(b"torn")
    (versions.folder_of(made.versions, 2) / "model.safetensors").write_bytes(b"torn")
    assert daemon.run(made.config) == 0
    assert versions.open_version(made.versions, versions.latest(made.versions))
    assert any(one["decision"] == "rolled back" and one["left"] == 2 for one in made.decisions())


def test_a_version_that_is_half_there_is_passed_over(loop: Callable[..., Any]) -> None:
    """As a copy of the folder that was cut off leaves it: no manifest, or weights without their
    end."""
    made = loop()
    daemon.run(replace(made.config, max_updates=0))
    half = versions.folder_of(made.versions, 2)
    first, some = versions.folder_of(made.versions, 1), shutil.ignore_patterns("manifest.json")
    shutil.copytree(first, half, ignore=some)
    weights = half / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:100])
    (made.versions / "learner" / ".state-3.0123abcd.tmp").mkdir(parents=True)
    shutil.copytree(half, made.versions / ".v000003.0123abcd.tmp")
    files.write_text(made.versions / ".current.0123abcd.tmp", "1")
    daemon.run(replace(made.config, max_updates=0))
    # Swept at the start, not at a publication.
    assert not [path for path in made.versions.rglob(".*") if path.suffix == ".tmp"]
    assert made.publish(made.draft) == 3 and daemon.run(made.config) == 0
    assert versions.latest(made.versions) == 3 and versions.versions(made.versions) == [1, 3]
    assert not list(made.versions.glob(".v*")) and versions.open_version(made.versions, 3)
    with pytest.raises(UserError, match="manifest of version 2"):
        versions.open_version(made.versions, 2)


# Clocks.


@pytest.mark.long
@pytest.mark.parametrize("jump_s", [-(10**6), 10**9])
def test_a_clock_that_jumps_changes_nothing_that_is_learned(
    loop: Callable[..., Any], monkeypatch: pytest.MonkeyPatch, jump_s: float
) -> None:
    made = loop()
    made.serve(40)
    daemon.run(replace(made.config, versions=str(made.root / "steady")))
    now_s = time.time
    monkeypatch.setattr(time, "time", lambda: now_s() + jump_s)
    daemon.run(made.config)
    jumped, steady = made.state(), made.state(made.root / "steady")
    assert jumped["counters"] == steady["counters"] and jumped["counters"]["updates"] > 0
    for name, value in steady["candidate"].items():
        torch.testing.assert_close(jumped["candidate"][name], value, rtol=0, atol=0)


def test_a_request_whose_records_are_on_their_way_is_waited_for(
    loop: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its server wrote nothing for a while, or its records are behind others in the buffer. One
    whose server is gone is taken."""
    made = loop()
    made.serve(1)
    records = BufferReader(made.config.buffer).read().records
    throttle = Throttle(1.0, threading.Event())
    learner = daemon.begin(made.config, Status(made.versions), throttle)
    (name,) = {record.request for record in records}

    def is_waited_for(found: list[RoundRecord], *, more: bool, silent_s: float) -> bool:
        learner.open.add(found)
        learner.open.seen_s[name] -= silent_s
        monkeypatch.setattr(learner.reader, "read", lambda **_: BufferReading([], more, 0))
        learner.take_in()
        return name in learner.open.records

    assert is_waited_for(records[:2], more=False, silent_s=SILENCE_S / 2)
    assert is_waited_for(records[2:4], more=True, silent_s=2 * SILENCE_S)
    assert not is_waited_for(records[4:5], more=False, silent_s=2 * SILENCE_S)
    assert learner.counters.orphans == 0
    assert [len(text.records) for text in [*learner.track.fresh, *learner.track.window]] == [5]


# Processes.


def test_two_learners_are_refused(loop: Callable[..., Any]) -> None:
    made = loop()
    says = f"process {os.getpid()}"
    with folder_lock(made.versions, "learner"), pytest.raises(UserError, match=says):
        daemon.run(made.config)


KILLED_SERVER = """
import os, sys
from draftsmith.distill.buffer.buffer import BufferReader, BufferWriter
source, copy = sys.argv[1:]
writer = BufferWriter(copy, flush_s=60.0, flush_records=10**6)
for number, record in enumerate(BufferReader(source).read(max_records=10**6).records):
    if number == 30:
        writer._flush()
        replace = os.replace
        # all bytes are on disk, under a name that is none yet
        os.replace = lambda *names: os.kill(os.getpid(), 9)
    writer.put(record)
writer._flush()
"""


def test_a_server_killed_amid_a_flush_loses_that_flush_alone(loop: Callable[..., Any]) -> None:
    made = loop()
    made.serve(10)
    copy = made.root / "copy"
    words = [sys.executable, "-c", KILLED_SERVER, made.config.buffer, str(copy)]
    killed = forked.run(words, capture_output=True, text=True)
    assert killed.returncode == -9, killed.stderr
    (leftover,) = copy.glob(".*.tmp")
    told = BufferReader(made.config.buffer).read(max_records=10**6).records
    reading = BufferReader(str(copy)).read()
    assert [same(one) for one in reading.records] == [same(one) for one in told[:30]]
    assert reading.damaged == 0
    assert leftover.stat().st_size > 1000 and len(told) > 30, (
        "the control: there was something to lose"
    )
    old_s = time.time() - 2 * files.LEFTOVER_AGE_S
    os.utime(leftover, (old_s, old_s))
    retain(ShardFolder(str(copy)), {}, max_bytes=1 << 30, max_age_s=3600.0)
    assert not list(copy.glob(".*")) and len(ShardFolder(str(copy)).shards()) == 1


def same(record: Any) -> dict[str, Any]:
    return {
        name: value for name, value in dataclasses.asdict(record).items() if name not in ("p", "q")
    }


RUN = """
import os, sys
from draftsmith.config import build
from draftsmith.distill import command
from draftsmith.distill.buffer.buffer import BufferReader
from draftsmith.distill.config import DistillConfig
from draftsmith.distill.state import StateFolder
import json
from tests.round_records import each
from draftsmith.distill import state
point, when = int(sys.argv[2]), sys.argv[3]
# One shard a cycle, each holding whole requests: what is learned then depends on the records
# alone, not on the clock.
read, saves = BufferReader.read, 0
BufferReader.read = lambda self, **_: read(self, max_records=1)
save = StateFolder.save
def counted(self, *args, **values):
    global saves
    saves += 1
    if saves == point and when == "before":
        os.kill(os.getpid(), 9)
    if saves == point and when == "amid":
        # the tensors are on disk, the records are not
        state.pq.write_table = lambda *_, **__: os.kill(os.getpid(), 9)
    save(self, *args, **values)
    if saves == point and when == "after":
        os.kill(os.getpid(), 9)
StateFolder.save = counted
command.run(build(DistillConfig, json.loads(sys.argv[1])))
"""


def learn_in_steps(
    made: Any, root: Path, point: int, when: str, *, run: Callable[..., Any] = forked.run
) -> subprocess.CompletedProcess:
    values = {
        "target": made.config.target, "draft": made.config.draft, "buffer": made.config.buffer,
        "versions": str(root),
        "until_idle_s": 0.5, "poll_s": 0.05, "save_s": 0.0,
        "learn": {
            "lr": 1e-3, "steps": 2, "fresh": 3, "unroll": {"steps": 2}, "batch": 4, "reservoir": 8,
        },
        "gate": {"every": 3, "held_out": 0.3},
    }  # fmt: skip
    words = [sys.executable, "-c", RUN, json.dumps(values), str(point), when]
    return run(words, capture_output=True, text=True)


@pytest.mark.long
@pytest.mark.parametrize(("point", "when"), [(3, "amid"), (3, "after"), (2, "before")])
def test_killed_learner_goes_on_without_repeating_or_losing_a_record(
    loop: Callable[..., Any], point: int, when: str
) -> None:
    made = loop()
    for wave in range(6):
        made.serve(5, seed=wave)
        time.sleep(0.002)
    # With another seed of `hash` than the forked ones.
    whole = learn_in_steps(made, made.root / "whole", 0, "never", run=subprocess.run)
    assert whole.returncode == 0, whole.stderr
    killed = learn_in_steps(made, made.root / "cut", point, when)
    assert killed.returncode == -9, killed.stderr
    assert learn_in_steps(made, made.root / "cut", 0, "never").returncode == 0
    state, reference = made.state(made.root / "cut"), made.state(made.root / "whole")
    assert state["counters"] == reference["counters"] and state["cursor"] == reference["cursor"]
    assert state["counters"]["updates"] >= 3 and state["counters"]["orphans"] == 0
    for name, value in reference["candidate"].items():
        torch.testing.assert_close(state["candidate"][name], value, rtol=0, atol=0)
    cut, whole = (versions.read_decisions(made.root / name) for name in ("cut", "whole"))
    assert cut and [one["decision"] for one in cut] == [one["decision"] for one in whole]
