"""Figures of the recorders of an engine's workers, as one engine's, and its floor: a version that
it gives up by itself, without the learner and without the store.

Each data-parallel replica has a recorder and a writer of its own.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple

# Figures by version, as the writer of records leaves them.
Figures = Mapping[str, Mapping[str, Any]]
COUNTS = ("rounds", "positions", "accepted", "judged")


def figures_of(workers: Sequence[Mapping[str, Any]]) -> Figures:
    """Figures by version over all writers: counts are added; z, evidence and alarm are those of the
    writer with the most evidence against losslessness."""
    writers = [records["writer"] for records in recorders(workers) if records.get("writer")]
    found: dict[str, list[Mapping[str, Any]]] = {}
    for writer in writers:
        for version, one in writer.get("versions", {}).items():
            found.setdefault(version, []).append(one)
    return {
        version: dict(parts[0]) if len(parts) == 1 else added(parts)
        for version, parts in found.items()
    }


def added(parts: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    counts = {name: sum(one.get(name, 0) for one in parts) for name in COUNTS}
    worst = max(parts, key=lambda one: one.get("log10_evidence", 0.0))
    return {
        **worst,
        **counts,
        "alpha": counts["accepted"] / max(1, counts["positions"]),
        "tau": 1 + counts["accepted"] / max(1, counts["rounds"]),
        "alarm": max(one.get("alarm", 0.0) for one in parts),
    }


def tokens_of(workers: Sequence[Mapping[str, Any]]) -> int:
    """Tokens that an engine has sampled: ranks of a replica sample the same ones."""
    by_replica: dict[int, int] = {}
    for worker in workers:
        tokens, replica = (worker.get("records") or {}).get("tokens", 0), worker.get("replica", 0)
        by_replica[replica] = max(tokens, by_replica.get(replica, 0))
    return sum(by_replica.values())


def recorders(workers: Iterable[Mapping[str, Any]]) -> list[Mapping[str, Any]]:
    return [worker.get("records") or {} for worker in workers]


class ServedVersions(NamedTuple):
    """Acceptance of one version on one engine, since it was last swapped in."""

    requests: int
    accepted: int
    reached: int  # drafted tokens up to the first rejected one of each round, inclusive
    is_alarmed: bool = False  # by the losslessness monitor

    @property
    def alpha(self) -> float:
        return self.accepted / self.reached if self.reached else 0.0


def below_floor(
    served: ServedVersions, before: ServedVersions | None, *, drop: float = 0.1, requests: int = 64
) -> str:
    """Reason to leave a version for the one `before` it; "" to stay.

    The floor is for disasters, `drop` in alpha over `requests` of each version; small losses are
    found by the rollout's paired evidence."""
    if served.is_alarmed:
        return "acceptance contradicts the logged probabilities: the losslessness monitor alarms"
    if before is None or min(served.requests, before.requests) < requests:
        return ""
    if served.alpha < before.alpha - drop:
        return (
            f"alpha {served.alpha:.3f} on {served.requests} requests, {before.alpha:.3f} with the "
            "version before"
        )
    return ""
