"""Floor of one engine: a version that it gives up by itself, without the learner and without the
store."""

from __future__ import annotations

from typing import NamedTuple


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
