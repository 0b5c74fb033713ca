"""Conditions that a run must meet, each a sentence where it does not."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from scripts.bench.fleet.kills import PLANTED

# Bound of |z| of each losslessness event.
MOST_Z = 3.0
# Versions after which alpha on the new traffic is compared.
LEARNED = 3
# Least share of the own engine's gain in alpha. Engines learn from one another's traffic at their
# own speed, so that gains differ by more than noise.
LEAST_SHARE = 0.5


def of_losslessness(figures: Mapping[str, Any]) -> Iterator[str]:
    far = {name: z for name, z in figures["z"].items() if not abs(z) < MOST_Z}
    if far or not figures["z"]:
        yield f"losslessness has z {far or 'of no event'}"
    if figures["violations"]:
        yield f"{figures['violations']} tokens were emitted that the target cannot sample"


def of_loop(figures: Mapping[str, Any]) -> Iterator[str]:
    """Sentences on `scripts/bench_fleet loop`; none where everything held."""
    requests = figures["requests"]
    if figures["failed"] or not requests:
        yield f"{figures['failed']} of {requests} requests failed"
    if figures["equal_texts"] != requests:
        yield f"{figures['equal_texts']} of {requests} texts are in the records as clients got them"
    yield from of_losslessness(figures)
    served = {one["version"] for one in figures["engines"]}
    if served != {figures["live"]}:
        yield f"engines serve versions {sorted(map(str, served))}, not the live {figures['live']}"
    if len(figures["versions"]) > LEARNED and gain_of(figures) <= 0:
        yield "alpha did not recover after the traffic changed"
    if own := figures.get("own"):
        yield from _of_own(figures, own)


def _of_own(figures: Mapping[str, Any], own: Mapping[str, Any]) -> Iterator[str]:
    if own["failed"]:
        yield f"{own['failed']} requests to draftsmith's own engine failed"
    gains = [gain_of(one) for one in (figures, own)]
    if len(figures["versions"]) > LEARNED and gains[0] < LEAST_SHARE * gains[1]:
        yield f"alpha rose by {gains[0]:.3f}, in draftsmith's own engine by {gains[1]:.3f}"


def gain_of(figures: Mapping[str, Any]) -> float:
    """Alpha in the last quarter of the new traffic minus that of the first draft on it."""
    first = next(iter(figures["prose"].values()), {"alpha": 0.0})
    return float(figures["last_quarter"]["alpha"] - first["alpha"])


def of_storm(figures: Mapping[str, Any]) -> Iterator[str]:
    """Sentences on `scripts/bench_fleet storm`; none where everything held."""
    yield from _of_kills(figures)
    yield from _of_answers(figures)
    yield from of_losslessness(figures)
    yield from _of_versions(figures)


def _of_kills(figures: Mapping[str, Any]) -> Iterator[str]:
    kills = figures["kills"]
    if len(kills) != figures["planned"] or not kills:
        yield f"{len(kills)} of {figures['planned']} kills were done"
    for one in kills:
        if not one["has_hit"]:
            yield f"a kill hit nothing: {one['what']} {one['engine']}"
        if one["back_after_s"] is None:
            yield f"this did not come back: {one['what']} {one['engine']}"


def _of_answers(figures: Mapping[str, Any]) -> Iterator[str]:
    if not figures["writers_ended"]:
        yield "writers did not end with their engines"
    if (
        not figures["recorded"]
        or figures["recorded"] + figures["lost_where_admitted"] != (figures["answers"])
    ):
        yield f"{figures['recorded']} of {figures['answers']} answers are in the records"
    sentences = {
        "changed": "answers have other tokens in the records",
        "lost_elsewhere": "answers were lost that no killed writer had",
        "failed_elsewhere": "requests failed while their engine was up",
    }
    for name, sentence in sentences.items():
        if figures[name]:
            yield f"{len(figures[name])} {sentence}"
    if figures["oldest_lost_s"] > figures["unflushed_s"]:
        yield f"an answer was lost {figures['oldest_lost_s']:.1f} s after its end"
    if not figures["greedy"] or figures["greedy_equal"] != figures["greedy"]:
        yield f"{figures['greedy_equal']} of {figures['greedy']} greedy answers are the target's"
    if silent := sorted(name for name, count in figures["served_after"].items() if not count):
        yield f"engines gave no answer after the last kill: {silent}"


def _of_versions(figures: Mapping[str, Any]) -> Iterator[str]:
    if figures["unverified"]:
        yield f"versions were served that do not verify: {figures['unverified']}"
    if len(figures["reported"]) < 2:
        yield "engines served one version alone"
    if not any(PLANTED in versions for versions in figures["refused"].values()):
        yield "no engine met the spoilt version"
    if figures["converged_s"] is None:
        yield "engines did not come to one version"
    digests = set(figures["digests"].values())
    if len(digests) != 1 or not all(digests):
        yield f"the served drafts differ: {figures['digests']}"
