"""Losslessness from records: the engine's own pass in every way of drafting, and those of an engine
that is wrong on purpose do not."""

from __future__ import annotations

import io
import json
import zlib
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
from prometheus_client import CollectorRegistry, generate_latest

from draftsmith.cli import main
from draftsmith.client import parse
from draftsmith.distill.buffer.buffer import BufferWriter
from draftsmith.distill.config import DistillConfig
from draftsmith.distill.daemon import Daemon
from draftsmith.distill.monitor.monitor import Monitor
from draftsmith.distill.status import StatusCollector
from draftsmith.drafters import checkpoint
from draftsmith.drafters.heads.eagle3 import Eagle3
from draftsmith.drafters.interface import ServingDrafter
from draftsmith.drafters.lm.draft_lm import DraftLm
from draftsmith.drafters.options import Eagle3Options
from draftsmith.drafters.target.target import Target
from draftsmith.drafters.text.suffix import Suffix
from draftsmith.record import RoundRecord
from draftsmith.serve.config import EngineConfig
from draftsmith.serve.engine.build import build_engine
from draftsmith.serve.requests.request import RequestOptions
from draftsmith.serve.sampling.params import SamplingParams
from tests.conftest import Records
from tests.integration.conftest import learner_of
from tests.stand_in_drafts import near

FALSE_ALARM = 1e-6
CONFIG = EngineConfig(seed=1, k=3, max_batch=16)
WARM = {"temperature": 1.0}
SAMPLINGS = (
    WARM,
    {"temperature": 0.7},
    {"temperature": 1.0, "top_k": 20},
    {"temperature": 0.5, "top_p": 0.7, "min_p": 0.05},
    {"temperature": 0.0},
)
PROMPT = [5, 60, 7, 200, 9, 33]


@pytest.fixture(scope="module")
def drafter(target: Target) -> DraftLm:
    """The target with some noise: most of its drafts are kept, not all."""
    return near(target)


def served(
    target: Target,
    drafter: ServingDrafter,
    config: EngineConfig,
    *samplings: dict,
    requests: int = 16,
) -> list[RoundRecord]:
    """Records of `requests` requests, the samplings in turn."""
    records = Records()
    engine = build_engine(target, drafter, config, sink=records, draft_version="7")
    for number in range(requests):
        sampling = {"max_tokens": 48, "ignore_eos": True, **samplings[number % len(samplings)]}
        engine.submit([*PROMPT, number], SamplingParams(**sampling), options=RequestOptions())
    while engine.busy:
        engine.step()
    return [one for one in records if one.drafted]


def monitor_of(records: list[RoundRecord]) -> Monitor:
    monitor = Monitor(FALSE_ALARM)
    monitor.look(records)
    return monitor


@pytest.fixture(scope="module")
def chains(target: Target, drafter: DraftLm) -> list[RoundRecord]:
    return served(target, drafter, CONFIG, *SAMPLINGS, requests=30)


def test_chains_of_the_engine_pass_whatever_the_sampling(chains: list[RoundRecord]) -> None:
    found = monitor_of(chains)
    everything = found.everything
    assert found.alarms == {} and everything.violations == 0 and everything.greedy > 100
    for name, one in everything.counts.items():
        assert one.count > 300 and one.variance > 20 and abs(one.z) < 4, name
    assert found.left_out.total() < 100


def test_blocks_of_the_engine_pass_by_their_first_token(target: Target, drafter: DraftLm) -> None:
    config = replace(CONFIG, verification="block")
    counts = monitor_of(served(target, drafter, config, WARM)).everything.counts
    assert counts["accepted"].count == counts["drafted"].count == counts["replaced"].count == 0
    assert counts["emitted"].count > 100 and abs(counts["emitted"].z) < 4


def test_trees_of_the_engine_pass_at_every_depth(target: Target) -> None:
    eagle = Eagle3.create(Eagle3Options(), target, seed=1).eval()
    found = monitor_of(served(target, eagle, replace(CONFIG, tree="sampled:2x2"), WARM))
    counts = found.everything.counts
    assert found.alarms == {} and counts["accepted"].count == 0
    assert counts["emitted"].count > 300 and abs(counts["emitted"].z) < 4


def test_drafts_that_are_not_drawn_pass(target: Target) -> None:
    found = monitor_of(served(target, Suffix(), CONFIG, {"temperature": 0.3}))
    counts = found.everything.counts
    assert found.alarms == {} and counts["accepted"].count > 20 and counts["drafted"].count == 0
    assert counts["replaced"].count == counts["accepted"].count


@pytest.fixture
def buffer(tmp_path: Path, chains: list[RoundRecord]) -> Callable[..., str]:
    def write(change: Callable[[RoundRecord], RoundRecord] = lambda one: one) -> str:
        writer = BufferWriter(str(tmp_path / "buffer"))
        for one in chains:
            writer.put(change(one))
        writer.close()
        return str(tmp_path / "buffer")

    return write


def daemon_of(tmp_path: Path, target: Target, buffer: str, log: io.StringIO) -> Daemon:
    config = DistillConfig(
        target=target.name, draft=str(tmp_path / "draft"), buffer=buffer,
        versions=str(tmp_path / "versions"),
    )  # fmt: skip
    return learner_of(config, log)


def test_the_learner_raises_an_alarm_once_and_shows_it(
    buffer: Callable[..., str], tmp_path: Path, target: Target, drafter: DraftLm
) -> None:
    def wrong(one: RoundRecord) -> RoundRecord:
        return replace(one, accepted=min(one.accepted + 1, len(one.drafted)))

    checkpoint.save(drafter, tmp_path / "draft", target)
    log, folder = io.StringIO(), buffer(wrong)
    daemon = daemon_of(tmp_path, target, folder, log)
    daemon.take_in()
    daemon.show()
    assert log.getvalue().count("ALARM: version 7 is not lossless") == 1
    registry = CollectorRegistry()
    registry.register(StatusCollector(daemon.status))
    found = parse(generate_latest(registry).decode())
    assert found.total("draftsmith_learner_lossless_alarms") == 2
    assert found.total("draftsmith_learner_lossless_alarm") == 2
    ours = {"engine": "", "version": "7"}
    assert found.total("draftsmith_learner_lossless_alarm", **ours) == 1
    assert found.total("draftsmith_learner_lossless_z_accepted", **ours) > 4
    daemon.save()
    again = io.StringIO()
    restarted = daemon_of(tmp_path, target, folder, again)
    restarted.take_in()
    assert restarted.monitor == daemon.monitor and "ALARM" not in again.getvalue()


def audit(folder: str, tmp_path: Path, *options: str) -> tuple[int, dict]:
    out = tmp_path / "report.json"
    status = main(["audit", "--buffer", folder, "--out", str(out), *options])
    return status, json.loads(out.read_text())[0]


def test_the_audit_of_a_buffer_is_lossless_and_leaves_no_mark(
    buffer: Callable[..., str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = buffer()
    before = sorted(path.name for path in Path(folder).iterdir())
    status, report = audit(folder, tmp_path)
    assert (status, report["verdict"]) == (0, "lossless"), report["sentence"]
    assert [check["name"] for check in report["checks"]] == ["all", "version 7"]
    assert abs(report["checks"][0]["evidence"]["z"]["accepted"]) < 4
    assert sorted(path.name for path in Path(folder).iterdir()) == before
    assert "LOSSLESS" in (told := capsys.readouterr().out) and "not tested" not in told


def test_the_audit_of_greedy_records_says_that_sampled_text_was_not_tested(
    buffer: Callable[..., str], tmp_path: Path
) -> None:
    folder = buffer(lambda one: one if one.temperature == 0 else replace(one, rule=""))
    status, report = audit(folder, tmp_path)
    assert status == 0 and "greedy text alone, sampled text was not tested" in report["sentence"]


def test_the_audit_of_a_buffer_of_several_names_the_engine_that_is_wrong(
    buffer: Callable[..., str], tmp_path: Path
) -> None:
    """Of two engines of one version, the second keeps every second rejected draft."""

    def from_two(one: RoundRecord) -> RoundRecord:
        is_second = zlib.crc32(one.request.encode()) % 2 == 0
        if is_second and one.round % 2 == 0 and one.accepted < len(one.drafted):
            one = replace(one, accepted=one.accepted + 1)
        return replace(one, engine="b:8001" if is_second else "a:8000")

    status, report = audit(buffer(from_two), tmp_path)
    assert (status, report["verdict"]) == (1, "lossy")
    passed = {check["name"]: check["passed"] for check in report["checks"]}
    assert passed.get("version 7 on a:8000") and passed.get("version 7 on b:8001") is False


@pytest.mark.parametrize(
    ("change", "note"),
    [
        ({"rule": ""}, "rounds of rule unknown"),
        ({"rule": "synthetic"}, "rounds of rule synthetic"),
        ({"seeded": True}, "records of seeded requests"),
        ({"p": [], "q": []}, "rounds without distributions"),
    ],
)
def test_what_cannot_be_judged_gives_no_verdict_and_is_counted(
    buffer: Callable[..., str], tmp_path: Path, change: dict, note: str
) -> None:
    status, report = audit(buffer(lambda one: replace(one, **change)), tmp_path)
    assert (status, report["verdict"]) == (1, "powerless")
    assert any(note in one for one in report["notes"])
    assert "--learn" in report["sentence"]
