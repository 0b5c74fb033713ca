"""Drift: alarms while nothing changes no more often than stated, drops found within tens of
requests, classes kept apart."""

from __future__ import annotations

import numpy as np
import pytest

from draftsmith.distill.buffer.traffic import ServedText
from draftsmith.distill.config import DriftConfig
from draftsmith.distill.gate.drift import BASELINE, MAX_CLASSES, ClassDetector, Drift, acceptance
from tests.round_records import round_record, served_text

OFFERED = 4


def served(
    rounds: list[int], *, time_s: float = 0.0, version: str = "1", request_class: str = ""
) -> ServedText:
    """A request with so many of four drafts accepted in each round."""
    records, position = [], 1
    for number, accepted in enumerate(rounds):
        committed = list(range(accepted + 1))
        records.append(
            round_record(
                round=number, request_class=request_class, draft_version=version, time_s=time_s,
                position=position, context=[0] if number == 0 else [],
                drafted=[0] * OFFERED, accepted=accepted, committed=committed, emitted=0,
            )
        )  # fmt: skip
        position += len(committed)
    return served_text(records)


def stream(
    generator: np.random.Generator, count: int, mean: float, concentration: float = 12.0
) -> np.ndarray:
    """x of requests that differ in how hard they are (beta distribution)."""
    return generator.beta(mean * concentration, (1 - mean) * concentration, count)


def alarms_of(values: np.ndarray, threshold: float, drop: float = 0.05) -> list[int]:
    """Requests at which there was an alarm; each is followed by a new level, as `Drift` does."""
    found, detector = [], ClassDetector(drop)
    for place, x in enumerate(values):
        if detector.observe(float(x), threshold) is not None:
            found.append(place)
            detector = ClassDetector(drop)
    return found


def test_acceptance_counts_what_was_reached() -> None:
    assert acceptance(served([4, 0, 2]), "1") == pytest.approx((4 + 0 + 2) / (4 + 1 + 3))
    assert acceptance(served([4]), "2") is None


@pytest.mark.parametrize("mean", [0.3, 0.9])
def test_false_alarms_are_as_rare_as_stated(mean: float) -> None:
    generator = np.random.default_rng(0)
    threshold = 300.0
    num = sum(len(alarms_of(stream(generator, 600, mean), threshold)) for _ in range(100))
    assert num <= 100 * 600 / threshold
    # The controls: without allowance for a level that is only measured, and with rounds that come
    # in bunches taken as requests.
    careless = 0
    for _ in range(100):
        values = stream(generator, 600, mean)
        detector = ClassDetector(0.0, level=float(mean), bound=float(mean) + 0.03)
        careless += sum(detector.observe(float(x), threshold) is not None for x in values)
    assert careless > 100 * 600 / threshold
    bunched = sum(
        len(alarms_of(np.repeat(stream(generator, 60, mean, 2.0), 30), 10 * threshold))
        for _ in range(40)
    )
    assert bunched > 40 * 1800 / (10 * threshold)


@pytest.mark.parametrize(("drop", "most"), [(0.15, 150), (0.3, 40), (0.5, 20)])
def test_drops_are_found_soon(drop: float, most: int) -> None:
    """Median delay in requests at one false alarm in 100,000 requests."""
    generator = np.random.default_rng(1)
    delays = []
    for _ in range(40):
        detector = ClassDetector(0.05)
        for x in stream(generator, BASELINE, 0.7):
            detector.observe(float(x), 1e5)
        found = next(
            (
                n
                for n, x in enumerate(stream(generator, 600, 0.7 - drop), 1)
                if detector.observe(float(x), 1e5)
            ),
            10**6,
        )
        delays.append(found)
    assert np.median(delays) <= most


def feed(
    drift: Drift,
    rounds: list[int],
    count: int,
    *,
    begin_s: float = 0.0,
    version: str = "1",
    name: str = "",
) -> list[object]:
    texts = (
        served(rounds, time_s=begin_s + 3.6 * n, version=version, request_class=name)
        for n in range(count)
    )
    return [alarm for text in texts if (alarm := drift.observe(text, "1")) is not None]


def test_alarm_names_the_class_and_wakes_the_learner() -> None:
    drift = Drift(DriftConfig(patience=2))
    assert (
        feed(drift, [3, 4], BASELINE, name="code")
        == []
        == feed(drift, [3, 4], BASELINE, name="chat")
    )
    assert [drift.count_decision(promoted=False) for _ in range(3)] == [
        False,
        True,
        False,
    ] and drift.is_resting
    # 2,000 requests an hour over two classes, one false alarm in 50 hours.
    assert drift.threshold() == pytest.approx(1000 * 2 / 0.02, rel=0.1)
    assert feed(drift, [3, 4], 100, begin_s=300, name="chat") == [] and drift.is_resting
    (alarm,) = feed(drift, [0, 1], 40, begin_s=300, name="code")[:1]
    assert (
        alarm.request_class == "code"
        and alarm.now < 0.5 < alarm.level
        and "'code'" in alarm.describe()
    )
    assert alarm.requests <= 40 and not drift.is_resting


def test_another_version_sets_its_own_level() -> None:
    drift = Drift(DriftConfig())
    feed(drift, [4, 4], BASELINE)
    assert feed(drift, [0, 0], 200, version="2") == [], "what another version did is not this one's"
    drift.new_version()
    assert feed(drift, [0, 0], 200) == [] and drift.to_dict()[""]["level"] == 0.0


def test_memory_and_clock_are_bounded() -> None:
    drift = Drift(DriftConfig())
    for number in range(2 * MAX_CLASSES):
        feed(drift, [1], 1, name=str(number))
    assert len(drift._detectors) == MAX_CLASSES
    assert drift.threshold() <= 1e9
    jumping = Drift(DriftConfig())
    for time_s in (1e9, 0.0, 5e8):
        jumping.observe(served([1], time_s=time_s), "1")
    assert jumping.threshold() >= 20
    never = Drift(DriftConfig(patience=0))
    assert not any(never.count_decision(promoted=False) for _ in range(100))
