"""Quarantine of a draft that was made for other weights of the target: lossless all the same, but
of unknown acceptance.

Servers draft with it seldom until a version made for their target is live. That is either a
candidate that passed the gate on the new target's traffic and reaches the floor, or the same draft
again, once that traffic shows that it still does.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np

from draftsmith.distill.buffer.traffic import ServedText
from draftsmith.distill.config import GateConfig
from draftsmith.distill.gate.gate import Decision
from draftsmith.distill.gate.scoring import Scorer
from draftsmith.drafters.published import versions


def notice(root: str | Path, version: int, own: str, report: Callable[[str], None]) -> str:
    """Target revision that a version was made for where that is not `own`, else "". Logged and
    reported once."""
    made_for = versions.stranger(root, version, own)
    entry = {"decision": "quarantine", "version": version, "target_revision": own}
    if made_for and not any(entry.items() <= one.items() for one in versions.read_decisions(root)):
        reason = f"made for target revision {made_for}, this is {own}"
        versions.record_decision(root, {**entry, "reason": reason})
        report(f"version {version} is in quarantine: {reason}")
    return made_for


def regate(
    live: Scorer, texts: Sequence[ServedText], config: GateConfig, *, max_depth: int
) -> Decision:
    """Decides on publishing the live draft again. `texts` are held-out ones, scored under the new
    target, of it or of weights that it had before. The mean over requests has to reach the floor by
    two standard errors."""
    scored = [
        one
        for one in live.score(texts, max_depth=max_depth)
        if one.is_consistent and len(one.alpha)
    ]
    means = np.array([float(one.alpha.mean()) for one in scored])
    if len(means) < config.requests:
        return Decision(
            "hold",
            f"quarantine: {len(means)} requests scored under the new target, {config.requests} are "
            "needed",
        )
    alpha, error = float(means.mean()), float(means.std(ddof=1)) / len(means) ** 0.5
    measured = f"alpha {alpha:.3f} +- {error:.3f} on {len(means)} requests under the new target"
    # Written so that NaN does not pass.
    if not alpha - 2 * error >= config.floor:
        return Decision("hold", f"quarantine: {measured} does not show {config.floor}")
    return Decision("accept", f"out of quarantine: {measured}")


def enough(decision: Decision, config: GateConfig) -> Decision:
    """Holds an accepted candidate that does not reach the floor: being better than a draft in
    quarantine does not make it good."""
    comparison = decision.comparison
    if decision.decision != "accept" or comparison is None or comparison.second >= config.floor:
        return decision
    return replace(
        decision,
        decision="hold",
        reason=f"quarantine: {decision.reason}, but alpha does not reach {config.floor}",
    )
