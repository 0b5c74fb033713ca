"""The goals as numbers, one a seed, from the finished cells of scripts/bench_online. Torch-free."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from typing import Any

from scripts.bench.drafters.figures import Figure, figure
from scripts.bench.online.cells import FIRST, SECOND, THIRD
from scripts.bench.online.figures import (
    RECOVERED,
    Answers,
    final_alpha,
    pooled_alpha,
    pooled_tau,
    recovered_after,
    segments,
)

Row = dict[str, Any]
# requests at the end of a visit or of a stream, and at the beginning of the next visit
AT_RETURN = 100
SETTLED = 200  # requests of a domain after which the newest held-out window holds no other
FEWEST = 30  # requests of a version that give its live alpha
WORTH = 0.02  # gain of a good update


def results(rows: Sequence[Row], part: str, name: str) -> dict[int, Row]:
    """Results keyed by seed."""
    return {
        row["cell"]["seed"]: row["result"]
        for row in rows
        if (row["cell"]["part"], row["cell"]["name"]) == (part, name)
    }


def over_seeds(values: Sequence[float]) -> Figure:
    return figure(list(values)) if values else Figure(math.nan, math.nan)


def curves(rows: Sequence[Row], name: str) -> dict[int, Answers]:
    return {seed: found["answers"] for seed, found in results(rows, "curves", name).items()}


def baseline(rows: Sequence[Row], name: str, seed: int, domain: str) -> Answers:
    found = results(rows, "baselines", "baselines")
    return (
        [one for one in found[seed]["answers"][name] if one["domain"] == domain]
        if seed in found
        else []
    )


def of_domain(answers: Answers, domain: str) -> Answers:
    return sorted(
        (one for one in answers if one["domain"] == domain), key=lambda one: one["number"]
    )


# After a sudden shift.


def gains(rows: Sequence[Row], name: str = "sudden", when: str = "online") -> list[float]:
    return [alpha_of(one, when) - one["static"] for one in compared(rows, name)]


def shares_of_offline(
    rows: Sequence[Row], name: str = "sudden", when: str = "online"
) -> list[float]:
    return [alpha_of(one, when) / one["offline"] for one in compared(rows, name)]


def alpha_of(one: Row, when: str) -> float:
    """NaN where it was not measured then."""
    found = one.get(when)
    return math.nan if found is None else float(found)


def compared(rows: Sequence[Row], name: str = "sudden") -> list[Row]:
    return [found["compared"] for found in results(rows, "curves", name).values()]


def recoveries(rows: Sequence[Row], name: str, domain: str) -> list[float]:
    """Requests until the alpha of the latest 50 is 90 % of where the curve ends."""
    return [recovery(of_domain(answers, domain)) for answers in curves(rows, name).values()]


def recovery(answers: Answers) -> float:
    found = recovered_after(answers, RECOVERED * final_alpha(answers))
    return math.nan if found is None else float(found)


def risen(rows: Sequence[Row], name: str, domain: str) -> list[float]:
    """The same of what was gained: until 90 % of the way from the static draft's alpha
    to the end."""
    values = []
    for seed, answers in curves(rows, name).items():
        start, second = (
            pooled_alpha(baseline(rows, "static", seed, domain)),
            of_domain(answers, domain),
        )
        found = recovered_after(second, start + RECOVERED * (final_alpha(second) - start))
        values.append(math.nan if found is None else float(found))
    return values


def cold_starts(rows: Sequence[Row]) -> list[float]:
    """Requests until a draft that began with random weights has 90 % of the warm one's tau; nan
    where it was not reached."""
    values = []
    for found in results(rows, "curves", "cold").values():
        # in the order in which they ended
        is_reached = pooled_tau(found["answers"][-AT_RETURN:]) >= RECOVERED * found["goal"]
        values.append(float(len(found["answers"])) if is_reached else math.nan)
    return values


def returns(rows: Sequence[Row], name: str) -> list[float]:
    values = []
    for answers in curves(rows, name).values():
        first, *_, last = segments(answers)
        values.append(pooled_alpha(last[:AT_RETURN]) / pooled_alpha(first[-AT_RETURN:]))
    return values


# The gate.


def trials(rows: Sequence[Row]) -> dict[int, list[Row]]:
    return {seed: found["trials"] for seed, found in results(rows, "gate", "gate").items()}


def is_bad(trial: Row) -> bool:
    return trial["kind"] != "update" and not number(trial["gain"]) >= 0


def is_good(trial: Row) -> bool:
    return trial["kind"] == "update" and number(trial["gain"]) >= WORTH


def number(gain: float | None) -> float:
    """JSON has no number for what a draft loses whose weights are not finite."""
    return -math.inf if gain is None else gain


def shares(rows: Sequence[Row], wanted: Any, is_accepted: bool) -> list[float]:
    found = [[trial for trial in some if wanted(trial)] for some in trials(rows).values()]
    return [
        sum((one["decision"] == "accept") == is_accepted for one in some) / len(some)
        for some in found
        if some
    ]


def rollbacks(rows: Sequence[Row]) -> list[Row]:
    return [one for found in results(rows, "gate", "gate").values() for one in found["forced"]]


# What was predicted of published versions.


def predictions(rows: Sequence[Row], names: Sequence[str], key: str) -> list[float]:
    """Mean of live - predicted alpha, one a seed, over the versions that were judged and served in
    one domain."""
    by_seed: dict[int, list[float]] = {}
    for name in names:
        for seed, found in results(rows, "curves", name).items():
            by_seed.setdefault(seed, []).extend(errors(found, key))
    return [sum(some) / len(some) for some in by_seed.values() if some]


def errors(found: Row, key: str) -> Iterator[float]:
    settled = {one["number"] for part in segments(found["answers"]) for one in part[SETTLED:]}
    for decision in found["decisions"]:
        if decision["decision"] != "accept" or isinstance(decision.get(key), str):
            continue
        mine = [one for one in found["answers"] if one["version"] == decision["version"]]
        if len(mine) >= FEWEST and all(one["number"] in settled for one in mine):
            yield pooled_alpha(mine) - decision[key]


# Streams.


def expected(rows: Sequence[Row], name: str, seed: int, answers: Answers) -> tuple[float, float]:
    """alpha and tau of a draft that does not change, on a stream of these domains."""
    sums = [0.0, 0.0, 0.0, 0.0]
    for domain in (FIRST, SECOND, THIRD):
        count, own = len(of_domain(answers, domain)), baseline(rows, name, seed, domain)
        if not count or not own:
            continue
        for index, value in enumerate(totals(own)):
            sums[index] += count * value / len(own)
    accepted, tried, committed, passes = sums
    return accepted / max(tried, 1e-9), committed / max(passes, 1e-9)


def totals(answers: Answers) -> tuple[float, float, float, float]:
    return (
        sum(one["accepted"] for one in answers),
        sum(one["tried"] for one in answers),
        sum(one["tokens"] - 1 for one in answers),
        sum(one["passes"] - 1 for one in answers),
    )


def cpu_seconds(answers: Answers) -> tuple[float, float]:
    """CPU seconds of serving and of learning per thousand requests."""
    last = max(answers, key=lambda one: one["serve_s"])
    return 1000 * last["serve_s"] / len(answers), 1000 * last["learn_s"] / len(answers)
