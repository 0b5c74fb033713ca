"""Staged rollout of a version: what carries it on, what withdraws it, and what a kill leaves."""

from __future__ import annotations

import dataclasses
import random
import uuid
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import pytest

from draftsmith.distill.buffer.traffic import ServedText
from draftsmith.drafters import versions
from draftsmith.fleet.config import FleetConfig, RolloutConfig
from draftsmith.fleet.rollout.command import controller_of
from draftsmith.fleet.rollout.controller import (
    ALARM,
    LATE_S,
    Controller,
    Half,
    StageTrial,
    TrialPairs,
)
from draftsmith.fleet.rollout.show import decided, end, summary, view_of
from draftsmith.fleet.store.layout import EngineStatus, Rollout
from draftsmith.fleet.store.store import VersionStore
from draftsmith.record import hashed
from tests.round_records import round_record, served_text

SWITCH_S = 100.0
CONFIG = RolloutConfig(switch_s=SWITCH_S, pairs=60, requests=2, hold_s=500.0)
ENGINES = [f"engine-{number}" for number in range(40)]


def text_of(
    engine: str, version: int | str, at_s: float, *, accepted: int = 2, ended_s: float | None = None
) -> ServedText:
    """A request of two rounds with 4 drafted tokens each, the second one after `ended_s`."""
    name, records, position = uuid.uuid4().hex, [], 2
    for number, time_s in enumerate((at_s, at_s if ended_s is None else ended_s)):
        committed = [7] * (accepted + 1)
        records.append(
            round_record(
                request=hashed(name), round=number, draft_version=str(version), time_s=time_s,
                position=position, context=[1, 2] if number == 0 else [], drafted=[7] * 4,
                accepted=accepted, committed=committed, engine=engine,
            )
        )  # fmt: skip
        position += len(committed)
    return served_text(records)


def rollout(**changes: Any) -> Rollout:
    values: dict[str, Any] = {"candidate": 8, "live": 7, "cut": 1.0, "stages": (0.25, 1.0)}
    return Rollout(**{**values, "switch_s": SWITCH_S, "begun_s": 1000.0, **changes})


def test_requests_count_in_the_period_of_the_version_that_drafted_for_them() -> None:
    one, pairs = rollout(), TrialPairs()
    engine = next(name for name in ENGINES if one.version_for(name, 1000.0) == 8)
    for at_s, version in ((1010.0, 8), (1050.0, 8), (1110.0, 7), (1150.0, 7)):
        pairs.observe(text_of(engine, version, at_s, accepted=3 if version == 8 else 1), one)
    assert pairs.left_out == 0
    pairs.observe(text_of(engine, 8, 1090.0, ended_s=1101.0), one)  # in flight over the switch
    pairs.observe(text_of(engine, 7, 1020.0), one)  # the engine switched late
    pairs.observe(text_of(engine, "", 1020.0), one)
    assert pairs.left_out == 3
    pairs.observe(text_of(engine, 8, 990.0), one)  # of before
    pairs.observe(text_of(engine, 8, 1010.0), dataclasses.replace(one, cut=0.0))  # of no part
    assert pairs.left_out == 3
    assert pairs.due(one, 1200.0 + LATE_S - 1) == -1 and pairs.due(one, 1200.0 + LATE_S) == 0
    found = pairs.take(0, requests=2)
    # 3 of 4 reached and 1 of 2 reached: a rejected token ends its round.
    assert found == {f"{engine}/0": pytest.approx(3 / 4 - 1 / 2)}
    pairs.observe(text_of(engine, 8, 1010.0), one)
    assert pairs.take(0, requests=1) == {} and pairs.upto == 0


def test_a_half_with_few_requests_is_no_pair() -> None:
    pairs = TrialPairs()
    for _ in range(3):
        pairs.add(Half("a", 0, True), 0.5)
    pairs.add(Half("a", 0, False), 0.5)
    pairs.add(Half("b", 1, True), 0.5)
    assert pairs.take(0, requests=2) == {} and list(pairs.parts) == [Half("b", 1, True)]


def judged(gain: float, *, seed: int, noise: float = 0.05, pairs: int = 60) -> bool | None:
    """Verdict about a candidate that is better by `gain`, None while undecided after `pairs`."""
    trial, draw = StageTrial(), random.Random(seed)
    for look in range(pairs // 4):
        trial.look({f"{look}/{n}": draw.gauss(gain, noise) for n in range(4)}, drop=CONFIG.drop)
        trial = StageTrial.from_dict(trial.to_dict())
        verdict = trial.verdict(dataclasses.replace(CONFIG, pairs=10**6))
        if verdict is not None:
            return verdict.is_good
    return None


def test_verdicts_are_right_and_seldom_wrong() -> None:
    assert [judged(-0.08, seed=seed) for seed in range(10)] == [False] * 10
    assert [judged(+0.05, seed=seed) for seed in range(10)] == [True] * 10
    same = [judged(0.0, seed=seed) for seed in range(80)]
    assert same.count(False) <= 8 and same.count(True) > 24, "error = 0.05 may be withdrawn"
    worse = [judged(-CONFIG.drop, seed=seed) for seed in range(80)]
    assert worse.count(True) <= 8, "error = 0.05 may go on"


def test_the_mean_decides_what_is_open_after_so_many_pairs() -> None:
    trial = StageTrial()
    trial.look({f"{number}": 0.3 * (-1) ** number for number in range(60)}, drop=0.02)
    verdict = trial.verdict(CONFIG)
    assert verdict is not None and verdict.is_good and "which does not decide it" in verdict.reason
    trial.total = -60 * 0.021
    verdict = trial.verdict(CONFIG)
    assert verdict is not None and not verdict.is_good


class Fleet:
    """Engines that follow at once, and their traffic: acceptance by version."""

    def __init__(self, store: VersionStore, accepted: dict[int, float]):
        self.store, self.accepted, self.now_s = store, accepted, 1000.0
        self.draw, self.told_s = random.Random(3), 1000.0
        self.refused: dict[str, dict[int, str]] = {}
        self.withdrawn: list[tuple[int, int]] = []
        store.clock = lambda: self.now_s

    def controller(
        self, *, records: bool = True, stages: tuple[float, ...] = (0.1, 0.5), **options: Any
    ) -> Controller:
        return Controller(
            self.store,
            stages,
            CONFIG,
            texts=self.texts if records else None,
            give_up=lambda version, live, reason: self.withdrawn.append((version, live)),
            clock=lambda: self.now_s,
            **options,
        )

    def report(self, **changes: Any) -> None:
        for engine in ENGINES:
            status = EngineStatus(
                engine=engine,
                version=self.store.wanted(engine),
                refused=self.refused.get(engine, {}),
                at_s=self.now_s,
            )
            self.store.put_engine(dataclasses.replace(status, **changes))

    def texts(self, since_s: float) -> Iterable[ServedText]:
        """Three requests per engine of the part and period, since the last call."""
        one = self.store.rollout()
        assert one is not None
        begun_s, self.told_s = max(since_s, self.told_s), self.now_s
        periods = range(
            int((begun_s - one.begun_s) // SWITCH_S), int((self.now_s - one.begun_s) // SWITCH_S)
        )
        for number in periods:
            at_s = one.begun_s + (number + 0.5) * SWITCH_S
            for engine in filter(one.has, ENGINES):
                version = one.version_for(engine, at_s)
                for _ in range(3):
                    accepted = sum(self.draw.random() < self.accepted[version] for _ in range(4))
                    yield text_of(engine, version, at_s, accepted=accepted)

    def run(self, controller: Controller, until_s: float) -> None:
        while self.now_s < until_s:
            self.now_s += 2 * SWITCH_S
            self.report()
            controller.step()

    @property
    def decisions(self) -> list[str]:
        one = self.store.rollout()
        return [] if one is None else [str(entry["decision"]) for entry in one.decisions]


@pytest.fixture
def store() -> VersionStore:
    store = VersionStore(f"memory://{uuid.uuid4().hex}")
    for version in (7, 8, 9):
        store.put_manifest(version, manifest(version))
    store.put_current(7)
    return store


def manifest(version: int) -> bytes:
    return (
        b'{"schema":1,"version":%d,"parent":null,"files":{"a":{"bytes":0,"sha256":""}}}' % version
    )


def test_a_good_candidate_goes_through_its_stages_to_all_engines(store: VersionStore) -> None:
    fleet = Fleet(store, {7: 0.4, 8: 0.6})
    fleet.report()
    controller = fleet.controller()
    assert controller.offer(8) and store.current() == 7
    tried = {engine for engine in ENGINES if store.rollout() and store.rollout().has(engine)}  # type: ignore[union-attr]
    assert len(tried) == 4
    assert controller.offer(8) and not controller.offer(9), "one at a time"
    fleet.run(controller, 20_000.0)
    assert fleet.decisions == ["begun", "goes on", "promoted"] and store.current() == 8
    assert {store.wanted(engine) for engine in ENGINES} == {8} and not fleet.withdrawn
    assert controller.offer(9)


def test_a_bad_candidate_is_withdrawn_in_its_first_stage(store: VersionStore) -> None:
    fleet = Fleet(store, {7: 0.6, 8: 0.4})
    fleet.report()
    controller = fleet.controller()
    controller.offer(8)
    fleet.run(controller, 20_000.0)
    assert fleet.decisions == ["begun", "rolled back"] and store.current() == 7
    assert fleet.withdrawn == [(8, 7)] and {store.wanted(engine) for engine in ENGINES} == {7}


def test_a_controller_that_is_killed_goes_on_from_what_it_counted(store: VersionStore) -> None:
    fleet = Fleet(store, {7: 0.5, 8: 0.5})
    fleet.report()
    fleet.controller().offer(8)
    counted = 0
    for until_s in (2000.0, 3000.0, 4000.0):
        fleet.run(fleet.controller(), until_s)
        one = store.rollout()
        assert one is not None
        if one.is_over or one.stage:
            break
        assert one.trial["pairs"] > counted, "nothing is lost, and no pair is counted twice"
        counted = one.trial["pairs"]
        assert counted <= (one.trial["upto"] + 1) * sum(map(one.has, ENGINES))


def test_engines_that_refuse_it_or_whose_monitor_alarms_end_the_stage(store: VersionStore) -> None:
    fleet = Fleet(store, {7: 0.5, 8: 0.5})
    fleet.report()
    controller = fleet.controller(stages=(0.5,))
    controller.offer(8)
    one = store.rollout()
    assert one is not None
    part = [engine for engine in ENGINES if one.has(engine)]
    outside = next(engine for engine in ENGINES if not one.has(engine))
    fleet.refused = {outside: {8: "torn"}, part[0]: {8: "its disk is full"}, part[1]: {7: "old"}}
    fleet.report()
    controller.step()
    assert fleet.decisions == ["begun"], "one of many, and others than this candidate's"
    fleet.refused |= {
        engine: {8: "alpha 0.1 on 64 requests"} for engine in part[: len(part) // 5 + 1]
    }
    fleet.report()
    controller.step()
    assert fleet.decisions == ["begun", "rolled back"] and fleet.withdrawn == [(8, 7)]
    assert "engines refuse it; engine-" in store.rollout().decisions[-1]["reason"]  # type: ignore[union-attr]

    fleet.refused = {}
    controller.offer(9)
    fleet.report(version=9, evidence=ALARM - 1)
    controller.step()
    fleet.report(version=7, evidence=ALARM + 1)
    controller.step()
    assert fleet.decisions[-1] == "begun", "it is another version's evidence"
    fleet.report(version=9, evidence=ALARM)
    controller.step()
    assert fleet.decisions[-1] == "rolled back"


def test_without_records_a_stage_passes_by_time_once_it_was_served(store: VersionStore) -> None:
    fleet = Fleet(store, {})
    fleet.report()
    controller = fleet.controller(records=False, stages=(0.5,))
    controller.offer(8)
    fleet.now_s += 10 * CONFIG.hold_s
    fleet.report(version=7)
    controller.step()
    assert fleet.decisions == ["begun"], "no engine has served it yet"
    fleet.report()
    controller.step()
    assert fleet.decisions == ["begun", "promoted"] and store.current() == 8


def test_a_stage_whose_engines_record_nothing_says_so_once(store: VersionStore) -> None:
    fleet, events = Fleet(store, {}), []
    controller = fleet.controller(event=events.append)
    controller.texts = lambda since_s: ()
    controller.offer(8)
    fleet.run(controller, fleet.now_s + 20 * SWITCH_S)
    assert fleet.decisions == ["begun"]
    assert ["waits: in 4 pairs of periods" in event for event in events] == [False, True]
    assert "waits: too few requests" in summary(view_of(store, now_s=fleet.now_s))[1]


def test_an_operators_choice_ends_the_rollout_also_while_records_are_read(
    store: VersionStore,
) -> None:
    fleet = Fleet(store, {7: 0.6, 8: 0.4})
    fleet.report()

    def texts(since_s: float) -> Iterable[ServedText]:
        one = store.rollout()
        assert one is not None
        end(store, one, "rolled back by hand")
        return []

    controller = fleet.controller()
    controller.offer(8)
    controller.texts = texts
    # Its records alone would withdraw it.
    begun, trial = store.rollout(), StageTrial()
    trial.look({f"{number}": -0.3 for number in range(60)}, drop=CONFIG.drop)
    verdict = trial.verdict(CONFIG)
    assert begun is not None and verdict is not None and not verdict.is_good
    store.put_rollout(dataclasses.replace(begun, trial=trial.to_dict()))
    fleet.now_s += 10 * SWITCH_S
    controller.step()
    one = store.rollout()
    assert one is not None and one.is_over and fleet.decisions == ["begun", "rolled back by hand"]
    controller.step()
    assert {store.wanted(engine) for engine in ENGINES} == {7}


def test_a_rollback_of_the_learner_ends_the_rollout_at_once(store: VersionStore) -> None:
    fleet = Fleet(store, {})
    controller = fleet.controller()
    controller.offer(8)
    assert controller.offer(7) and store.current() == 7
    assert fleet.decisions == ["begun", "ended"]


def test_the_learner_goes_on_from_what_engines_serve(tmp_path: Path, store: VersionStore) -> None:
    root = tmp_path / "versions"
    for _ in range(2):
        versions.publish(
            root,
            lambda folder: (folder / "config.json").write_text("{}") and None,
            family="fake", target={}, parent=None, data_range={}, gate={},
        )  # fmt: skip
    config = FleetConfig(action="publish", versions=str(root), stages=(0.1,))
    controller = controller_of(store, root, config)
    assert controller is not None
    controller.give_up(2, 1, "accepted less")
    assert versions.latest(root) == 1
    assert (
        versions.read_decisions(root)[-1]["reason"] == "withdrawn from the engines: accepted less"
    )
    controller.give_up(2, 1, "again")
    assert len(versions.read_decisions(root)) == 1


def test_decisions_are_kept_up_to_a_bound() -> None:
    one = rollout()
    for number in range(60):
        one = decided(one, str(number))
    assert [entry["decision"] for entry in one.decisions] == [str(n) for n in range(10, 60)]
