"""Evidence at every look: false alarms over many looks, power, and broken variants."""

from __future__ import annotations

import json
import math
from dataclasses import asdict

import numpy as np
import pytest

from draftsmith.distill.gate import sequential
from draftsmith.distill.gate.sequential import BoundedEvidence, Evidence, Ledger, TurningEvidence
from draftsmith.files import restored

ERROR = 0.05
WINDOW, PER_LOOK = 48, 5
LINEAGES = 200
# A rate of 0.05 seen over so many is above this once in about 700 times.
MOST_FALSE = 0.05 + 3 * math.sqrt(0.05 * 0.95 / LINEAGES)


def lineage(
    generator: np.random.Generator, effect: float, looks: int, *, first: int = WINDOW
) -> list[dict[str, float]]:
    """Windows of each look. Candidates differ from look to look, yet mostly agree on a request;
    `effect` is in units of their spread."""
    total = first + PER_LOOK * looks
    common = generator.standard_normal(total)
    windows = []
    for look in range(1, looks + 1):
        differences = 0.8 * common + 0.6 * generator.standard_normal(total) + effect
        end = first + PER_LOOK * (look - 1)
        windows.append(
            {str(place): 0.03 * differences[place] for place in range(max(0, end - WINDOW), end)}
        )
    return windows


def promoted_at(windows: list[dict[str, float]]) -> int | None:
    evidence = Evidence()
    return next(
        (look for look, one in enumerate(windows, 1) if evidence.look(one, ERROR) >= 1 / ERROR),
        None,
    )


def rate(found: list[int | None]) -> float:
    return float(np.mean([look is not None for look in found]))


def test_no_gain_is_seldom_promoted_however_often_one_looks() -> None:
    generator = np.random.default_rng(1)
    found = [promoted_at(lineage(generator, 0.0, 60)) for _ in range(LINEAGES)]
    assert rate(found) <= MOST_FALSE
    # The control: the same looks, each with the whole error to itself.
    careless = 0
    for _ in range(50):
        windows = lineage(generator, 0.0, 60)
        careless += any(sequential_p(one) <= ERROR for one in windows)
    assert careless / 50 > 2 * MOST_FALSE


def sequential_p(window: dict[str, float]) -> float:
    values = np.array(list(window.values()))
    return math.erfc(float(values.sum()) / math.sqrt(2 * float((values**2).sum()))) / 2


def with_fresh(
    generator: np.random.Generator, effect: float, looks: int, *, per_look: int = 12
) -> list[tuple[dict[str, float], dict[str, float]]]:
    """Windows, each with the differences of the fresh texts since the look before."""
    windows = lineage(generator, effect, looks, first=12)
    spread = effect + generator.standard_normal((looks, per_look))
    fresh = [
        {f"f{look} {at}": 0.03 * d for at, d in enumerate(row)} for look, row in enumerate(spread)
    ]
    return list(zip(fresh, windows, strict=True))


def promoted_with_fresh(pairs: list[tuple[dict[str, float], dict[str, float]]]) -> int | None:
    evidence = Evidence()
    for look, (fresh, window) in enumerate(pairs, 1):
        evidence.add_fresh(fresh)
        if evidence.look(window, ERROR) >= 1 / ERROR:
            return look
    return None


@pytest.mark.long
def test_fresh_texts_promote_no_more_without_a_gain_and_sooner_with_one() -> None:
    generator = np.random.default_rng(11)
    none = [promoted_with_fresh(with_fresh(generator, 0.0, 60)) for _ in range(LINEAGES)]
    assert rate(none) <= MOST_FALSE
    some = [with_fresh(generator, 0.4, 12) for _ in range(100)]
    ours = rate([promoted_with_fresh(one) for one in some])
    alone = rate([promoted_at([window for _, window in one]) for one in some])
    assert ours > alone + 0.3, (ours, alone)


def test_each_fresh_text_is_bet_on_once_at_the_next_look() -> None:
    evidence, window = Evidence(), {str(place): 0.0 for place in range(20)}
    evidence.add_fresh({"a": 0.1, "b": 0.1})
    saved = json.loads(json.dumps(asdict(Ledger(gate=evidence))))
    again = restored(Ledger, saved).gate
    value = evidence.look(window, ERROR)
    assert value == again.look(window, ERROR) > 0.5 and not evidence.fresh
    money = list(evidence.once.money)
    evidence.look(window, ERROR)
    stake = sequential.share_of(2) / len(money)
    assert evidence.once.money == pytest.approx([one + stake for one in money])


def test_fresh_texts_go_with_their_candidate_and_are_bounded() -> None:
    evidence = Evidence()
    evidence.add_fresh({str(place): 0.1 for place in range(sequential.MOST_FRESH + 5)})
    assert len(evidence.fresh) == sequential.MOST_FRESH and "4" not in evidence.fresh
    evidence.new_candidate()
    assert evidence.fresh == {}


def test_large_gains_are_promoted_at_the_first_look_and_losses_never() -> None:
    generator = np.random.default_rng(4)
    assert all(promoted_at(lineage(generator, 2.0, 3, first=24)) == 1 for _ in range(50))
    assert rate([promoted_at(lineage(generator, -0.5, 40)) for _ in range(50)]) == 0.0


def test_size_of_the_differences_does_not_matter() -> None:
    window = lineage(np.random.default_rng(5), 0.4, 1)[0]
    values = [
        Evidence().look({name: scale * d for name, d in window.items()}, ERROR)
        for scale in (1e-6, 1.0, 1e3)
    ]
    assert values == pytest.approx([values[0]] * 3, rel=1e-6)
    assert Evidence().look({str(place): 0.0 for place in range(20)}, ERROR) == pytest.approx(0.5)


def test_a_new_candidate_keeps_no_winnings() -> None:
    evidence = Evidence()
    evidence.look({str(place): 0.1 for place in range(40)}, ERROR)
    assert evidence.value > 1e4
    evidence.new_candidate()
    # half of the half that is bet on each request once
    assert evidence.value == pytest.approx(0.25)
    evidence.look({str(place): -0.1 for place in range(40, 80)}, ERROR)
    lost = evidence.value
    evidence.new_candidate()
    assert evidence.value <= lost < 0.25 and evidence.once.looks == 2


def test_very_long_evidence_stays_finite() -> None:
    evidence, bounded, turning = Evidence(), BoundedEvidence(), TurningEvidence()
    differences = {str(place): 0.5 for place in range(5000)}
    assert math.isfinite(evidence.look(differences, ERROR)) and math.isfinite(
        bounded.look(differences)
    )
    assert (
        math.isfinite(turning.look(differences))
        and TurningEvidence().look({"0": 0.0, "1": 0.0}) == 0.5
    )


def skewed(generator: np.random.Generator, looks: int, gap: float = 0.0) -> list[dict[str, float]]:
    """alpha minus what was accepted, of requests with one position each: alpha is low, so that most
    differences are small and positive and a few large and negative."""
    kept = generator.random(20 * looks) < 0.15 - gap
    values = 0.15 - kept
    return [
        {str(place): values[place] for place in range(20 * look, 20 * look + 20)}
        for look in range(looks)
    ]


def ever(evidence: Evidence | BoundedEvidence, windows: list[dict[str, float]]) -> bool:
    told = (
        evidence.look(one, ERROR) if isinstance(evidence, Evidence) else evidence.look(one)
        for one in windows
    )
    return any(value >= 1 / ERROR for value in told)


def test_bounded_evidence_needs_no_symmetry() -> None:
    generator = np.random.default_rng(6)
    worlds = [skewed(generator, 20) for _ in range(LINEAGES)]
    assert np.mean([ever(BoundedEvidence(), one) for one in worlds]) <= MOST_FALSE
    # The control: the evidence that presumes symmetry is fooled by just this.
    assert np.mean([ever(Evidence(), one) for one in worlds]) > 2 * MOST_FALSE
    assert (
        np.mean([ever(BoundedEvidence(), skewed(generator, 20, gap=0.1)) for _ in range(50)]) > 0.95
    )


def turned(
    generator: np.random.Generator, before: float, after: float, *, turn: int, looks: int
) -> list[dict[str, float]]:
    """Windows of differences around `before` up to look `turn` and around `after` from then on, in
    units of their spread."""
    total = PER_LOOK * looks
    values = generator.standard_normal(total) + np.where(
        np.arange(total) < PER_LOOK * turn, before, after
    )
    ends = range(PER_LOOK, total + 1, PER_LOOK)
    return [
        {str(place): 0.04 * values[place] for place in range(max(0, end - WINDOW), end)}
        for end in ends
    ]


def test_candidates_that_were_worse_before_the_traffic_changed_are_promoted_when_they_are_better(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    generator = np.random.default_rng(10)
    worlds = [
        turned(generator, -0.4, 1.0, turn=30, looks=30 + WINDOW // PER_LOOK) for _ in range(60)
    ]
    assert rate([promoted_at(one) for one in worlds]) > 0.8
    # The control, whose losses are never forgiven.
    monkeypatch.setattr(sequential, "share_of", lambda look: 1.0 if look == 1 else 1e-300)
    assert rate([promoted_at(one) for one in worlds]) < 0.2
