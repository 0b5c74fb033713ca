"""Events of positions against exact probabilities, the false-alarm rate of the evidence, and what an
engine can do wrong."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace
from functools import cache
from typing import Any

import numpy as np
import pytest

from draftsmith.distill.buffer.record_table import from_table, to_table
from draftsmith.distill.monitor.events import (
    STRENGTHS,
    Bets,
    EvidenceCounts,
    MonitorEvent,
    events_of,
)
from draftsmith.distill.monitor.monitor import MOST_STREAMS, Monitor
from draftsmith.distill.monitor.positions import Positions, positions_of
from draftsmith.record import RoundRecord
from tests.round_records import Distribution, each, logged, round_record

VOCAB = 300  # more than the 64 that are logged
TOP = 64
NUM_PAIRS = 12


def law(sharpness: float, generator: np.random.Generator) -> np.ndarray:
    logits = sharpness * generator.standard_normal(VOCAB)
    return np.exp(logits - np.logaddexp.reduce(logits))


def pairs(seed: int = 0, sharpness: float = 1.2) -> list[tuple[np.ndarray, np.ndarray]]:
    generator = np.random.default_rng(seed)
    found = []
    for _ in range(NUM_PAIRS):
        p = law(sharpness, generator)
        q = p * np.exp(0.7 * generator.standard_normal(VOCAB))
        found.append((p, q / q.sum()))
    return found


@cache
def likeliest(data: bytes) -> tuple[list[int], list[float], float]:
    probs = np.frombuffer(data)
    kept = [int(token) for token in np.argsort(-probs)[:TOP] if probs[token] > 0]
    return kept, np.log(probs[kept]).tolist(), float(max(0.0, 1 - probs[kept].sum()))


def law_of(probs: np.ndarray, drafted: int, *, unrounded: bool = True) -> Distribution:
    is_known = unrounded and probs[drafted] > 0
    own = float(np.log(probs[drafted])) if is_known else None
    return Distribution(*likeliest(probs.tobytes()), drafted=own)


def round_of(
    p: np.ndarray, q: np.ndarray, generator: np.random.Generator, **changes: Any
) -> RoundRecord:
    """One drafted token, verified as a chain. `drawn` is the distribution that it was drawn from,
    `residual` the one its replacement is, `bonus` is added to its chance to be accepted, and `draw`
    draws both tokens from their distributions."""
    drawn, bonus = changes.pop("drawn", q), changes.pop("bonus", 0.0)
    unrounded = changes.pop("unrounded", True)
    draw = changes.pop("draw", lambda probs: int(generator.choice(VOCAB, p=probs)))
    x = draw(drawn)
    kept = bool(generator.random() < min(1.0, p[x] / q[x]) + bonus)
    rest = np.maximum(changes.pop("residual", p - q), 0)
    emitted = draw(p if kept else rest / rest.sum())
    record = round_record(
        drafted=[x], accepted=int(kept), committed=[x, emitted] if kept else [emitted],
        p=logged(law_of(p, x, unrounded=unrounded)),
        q=logged(law_of(q, x, unrounded=unrounded)), rule="chain",
    )  # fmt: skip
    return replace(record, **changes)


def stored(records: list[RoundRecord]) -> list[RoundRecord]:
    return from_table(to_table(records))


def events(records: list[RoundRecord]) -> tuple[Positions, dict[str, MonitorEvent]]:
    positions = positions_of(records)
    assert positions is not None
    rules = np.array([one.rule for one in records])[positions.record]
    return positions, {one.name: one for one in events_of(positions, rules)}


def exact_chances(p: np.ndarray, q: np.ndarray, x: int) -> dict[str, float]:
    """Float64 over the whole vocabulary, event by event."""
    halves = []
    for probs in (q, p):
        order = np.argsort(-probs)
        halves.append(order[np.cumsum(probs[order]) - probs[order] < 0.5])
    both = set(np.argsort(-p)[:TOP].tolist()) & set(np.argsort(-q)[:TOP].tolist())
    likelier = sorted((one for one in both if p[one] > q[one]), key=lambda one: -p[one] / q[one])
    gains = (p - q)[likelier]
    half = gains.cumsum() - gains < gains.sum() / 2
    return {
        "accepted": min(1.0, p[x] / q[x]),
        "drafted": q[halves[0]].sum(),
        "replaced": gains.sum(),
        "residual": gains[half].sum() / gains.sum(),
        "emitted": p[halves[1]].sum(),
    }


@pytest.mark.parametrize("unrounded", [True, False])
def test_chances_are_the_exact_ones_within_their_errors(unrounded: bool) -> None:
    generator = np.random.default_rng(1)
    records = [round_of(*pair, generator, unrounded=unrounded) for pair in pairs() * 4]
    positions, found = events(stored(records))
    assert len(positions) == len(records)
    for name, event in found.items():
        for at, chance, error in zip(event.at, event.chance, event.error, strict=True):
            p, q = (pairs() * 4)[at]
            exact = exact_chances(p, q, records[at].drafted[0])[name]
            most = 0.1 if name == "residual" else 0.01  # a quotient of small sums
            assert abs(chance - exact) <= error + 1e-9 and error < most, name
    told = len(found["accepted"].at)
    assert {len(found[name].at) for name in ("drafted", "replaced", "emitted")} == {len(records)}
    assert told == len(records) if unrounded else 0 < told < len(records)


def test_records_without_filters_are_read_alike_beside_filtered_ones() -> None:
    generator = np.random.default_rng(4)
    drawn = [round_of(*pair, generator) for pair in pairs() * 2]
    mixed = [*drawn, round_of(*pairs()[0], generator, top_k=5)]
    alone, beside = positions_of(stored(drawn)), positions_of(stored(mixed))
    assert alone is not None and beside is not None and len(beside) == len(alone) + 1
    for name, values in vars(alone).items():
        np.testing.assert_array_equal(values, getattr(beside, name)[:-1], err_msg=name)
    assert (beside.p[-1] > 0).sum() == 5


def test_what_has_no_mass_in_q_replaces_nothing_twice() -> None:
    p, q = np.zeros(VOCAB), np.zeros(VOCAB)
    p[:4], q[:2] = [0.1, 0.2, 0.3, 0.4], [0.5, 0.5]
    generator = np.random.default_rng(5)
    wide = [round_of(*pair, generator) for pair in pairs()]
    _, found = events([*wide, round_of(p, q, generator)])
    # Tokens 2 and 3 are outside q, whose tail is none: all that p has more than q.
    assert found["replaced"].chance[-1] == pytest.approx(0.7)


def test_positions_left_out_by_what_came_before_do_not_bias() -> None:
    """Of rounded records only drafted tokens among the 64 can be judged; x lies outside more often
    where it is accepted less, and still the kept ones are accepted as expected. A condition on the
    outcome is none: the accepted rounds alone are far off."""
    generator = np.random.default_rng(2)
    records = stored([round_of(*one, generator, unrounded=False) for one in pairs() * 170])
    counts = EvidenceCounts()
    _, found = events(records)
    accepted = found["accepted"]
    assert 0.3 * len(records) < len(accepted.at) < 0.9 * len(records)
    counts.add(accepted, np.ones(len(accepted.at), dtype=bool))
    assert abs(counts.z) < 4
    biased = EvidenceCounts()
    biased.add(accepted, accepted.happened | (generator.random(len(accepted.at)) < 0.5))
    assert biased.z > 6


def simulated(streams: int, length: int, seed: int) -> tuple[np.ndarray, np.ndarray]:
    """Events [streams, length] of `accepted` and their probabilities, x drawn from q."""
    generator = np.random.default_rng(seed)
    laws = pairs(seed)
    which = generator.integers(len(laws), size=(streams, length))
    chance = np.empty((streams, length))
    for index, (p, q) in enumerate(laws):
        mine = which == index
        x = generator.choice(VOCAB, size=int(mine.sum()), p=q)
        chance[mine] = np.minimum(1.0, p[x] / q[x])
    return generator.random((streams, length)) < chance, chance


def money(happened: np.ndarray, chance: np.ndarray) -> np.ndarray:
    """Log evidence [streams, length] after every event, by the bets' formula."""
    logs = np.stack(
        [
            np.cumsum(happened * strength - np.log1p(chance * np.expm1(strength)), axis=1)
            for strength in STRENGTHS
        ]
    )
    return np.logaddexp.reduce(logs, axis=0) - math.log(len(STRENGTHS))


def test_false_alarms_of_2000_honest_streams_looked_at_after_every_event() -> None:
    happened, chance = simulated(2000, 400, 3)
    highest = money(happened, chance).max(axis=1)
    for level in (0.05, 0.01):
        alarms = int((highest >= -math.log(level)).sum())
        # three standard deviations above the stated level
        assert alarms <= 2000 * level + 3 * math.sqrt(2000 * level), (level, alarms)
    # `Bets` are the same sums.
    bets = Bets()
    for at in (slice(0, 150), slice(150, 400)):
        part = MonitorEvent("accepted", np.arange(at.stop - at.start), happened[0, at], chance[0, at],
                     np.zeros(at.stop - at.start))  # fmt: skip
        bets.add(part, np.ones(at.stop - at.start, dtype=bool))
    assert bets.log_evidence == pytest.approx(money(happened[:1], chance[:1])[0, -1], abs=1e-9)


@pytest.mark.parametrize("rate", [0.48, 0.52])
def test_rounding_never_becomes_evidence(rate: float) -> None:
    """A probability that is off by as much as it may be; the control is one stated as exact."""
    count = 20_000
    happened = np.random.default_rng(8).random(count) < rate
    everything = np.ones(count, dtype=bool)

    def found(error: float) -> float:
        bets = Bets()
        errors = np.full(count, error)
        bets.add(
            MonitorEvent("accepted", np.arange(count), happened, np.full(count, 0.5), errors),
            everything,
        )
        return bets.log_evidence

    assert found(0.02) < 3 and found(0.0) > 10


@pytest.mark.parametrize(
    ("lie", "event"),
    [
        ({"bonus": 0.15}, "accepted"),
        ({"bonus": -0.15}, "accepted"),
        ({"drawn": "p"}, "drafted"),
        ({"residual": "p"}, "replaced"),
    ],
)
def test_what_an_engine_can_do_wrong_is_found_where_it_is_wrong(lie: dict, event: str) -> None:
    generator = np.random.default_rng(5)
    found = Monitor(1e-6)
    records = []
    for p, q in pairs(sharpness=2.0) * 170:
        records.append(
            round_of(p, q, generator, **{name: p if x == "p" else x for name, x in lie.items()})
        )
    found.look(stored(records))
    counts = found.everything.counts
    others = [name for name in ("accepted", "drafted", "replaced") if name != event]
    assert found.alarms and abs(counts[event].z) > 5
    if event == "drafted":
        assert abs(counts["accepted"].z) < 4, "accepted as the logged q says"
    if event == "replaced":
        assert all(abs(counts[name].z) < 4 for name in others)


@pytest.mark.parametrize("is_shared", [True, False])
def test_a_replacement_by_the_noise_of_its_draft_is_found(is_shared: bool) -> None:
    """As the V2 runner of vLLM 0.21 to 0.28 draws (#54282): of the likeliest of logits with noise,
    a draft's and its replacement's by the same noise; and as later ones do, each by its own."""
    generator = np.random.default_rng(9)
    found = Monitor(1e-4)

    def drawer() -> Callable[[np.ndarray], int]:
        kept = generator.gumbel(size=VOCAB)

        def draw(probs: np.ndarray) -> int:
            noise = kept if is_shared else generator.gumbel(size=VOCAB)
            return int(np.argmax(np.log(np.maximum(probs, 1e-300)) + noise))

        return draw

    records = [round_of(*pair, generator, draw=drawer()) for pair in pairs(sharpness=2.0) * 400]
    found.look(stored(records))
    counts = found.everything.counts
    assert bool(found.alarms) == is_shared and (counts["residual"].z > 5) == is_shared
    assert all(abs(one.z) < 4 for name, one in counts.items() if name != "residual")


def test_honest_rounds_raise_no_alarm_and_alarms_come_once() -> None:
    generator = np.random.default_rng(6)
    found = Monitor(1e-6)
    for _ in range(5):
        assert found.look(stored([round_of(*pair, generator) for pair in pairs() * 20])) == []
    wrong = [round_of(*pair, generator, bonus=0.5, draft_version="2") for pair in pairs() * 40]
    said = found.look(stored(wrong))
    assert any(one.startswith("version 2 is not lossless: accepted") for one in said)
    assert found.look(stored(wrong)) == [] and "version 1" not in found.alarms


def greedy(token: int, gap: float, **changes: Any) -> RoundRecord:
    near = Distribution([3, 4], [-0.5, -0.5 - gap], 0.0)
    base = round_of(*pairs()[0], np.random.default_rng(0))
    return replace(
        base, temperature=0.0, drafted=[3], accepted=int(token == 3), emitted=token,
        committed=[token], p=logged(near), q=logged(Distribution([3], [0.0], 0.0)), **changes
    )  # fmt: skip


def test_a_greedy_token_that_is_not_the_argmax_is_a_violation_but_for_ties() -> None:
    found = Monitor(1e-9)
    assert found.look(stored([greedy(3, 0.1), greedy(4, 0.0), greedy(3, 0.0)])) == []
    assert found.everything.greedy == 1 and found.left_out["greedy positions with a tie"] == 2
    (_, said) = found.look(stored([greedy(4, 0.1)]))
    assert "1 tokens that cannot stand" in said
    assert Monitor(1e-9).look(stored([greedy(4, 0.1, rule="synthetic")])) == []


def test_a_token_that_filters_cut_is_a_violation() -> None:
    base = round_of(*pairs()[0], np.random.default_rng(0))
    ids = each(base.p)[0].ids
    wrong = replace(base, top_k=3, accepted=0, drafted=[ids[0]], emitted=ids[5], q=base.q[:1])
    assert Monitor(1e-9).look(stored([wrong]))
    assert not Monitor(1e-9).look(stored([replace(wrong, emitted=ids[2])]))
    # 70 tokens: whether the filter cuts among those that are not logged is not known.
    outside = Monitor(1e-9)
    assert not outside.look(stored([replace(wrong, top_k=70)]))
    assert outside.left_out["positions whose filters cut outside the logged tokens"] == 1


def test_versions_without_end_keep_few_streams_each_with_a_smaller_share() -> None:
    found = Monitor(1e-6)
    base = round_of(*pairs()[0], np.random.default_rng(0))
    for number in range(MOST_STREAMS + 20):
        found.look([replace(base, draft_version=str(number))])
    assert len(found.streams) == MOST_STREAMS and found.begun == MOST_STREAMS + 21
    levels = [one.log_level(1e-6) for one in found.streams.values()]
    assert levels == sorted(levels) and levels[-1] > levels[0] + 2
    numbers = [one.number for one in found.streams.values()]
    assert numbers == sorted(numbers) and numbers[-1] == found.begun
