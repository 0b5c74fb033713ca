"""The drafts of a server beside each other, for the dashboard: who gets how many requests, and what the learner says of each."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from draftsmith.kernels.acceptance import AcceptanceCounts
from draftsmith.serve.dashboard.samples import Counts
from draftsmith.serve.drafts.routing import CANARY, class_draft, shown
from draftsmith.serve.stats import EngineStats


def drafts(stats: EngineStats, canary_share: float, learner: Mapping[str, Any] | None) -> list[dict[str, Any]]:
    """A row a draft, the live one first; then the classes that the learner has and this server has no draft for. `learner` is its
    status."""
    pool = (learner or {}).get("pool") or {}
    notes = {class_draft(name): note(told) for name, told in pool.items()}
    notes[CANARY] = f"on trial, {100 * canary_share:.0f} % of the requests"
    served = stats.draft_versions
    rows = [row(stats, draft, version, notes.get(draft, "")) for draft, version in served.items()]
    return rows + [row(stats, draft, "", notes[draft]) for draft in map(class_draft, pool) if draft not in served]


def row(stats: EngineStats, draft: str, version: str, note: str) -> dict[str, Any]:
    routed = dict(stats.routed)
    requests, total = routed.get(draft, 0), sum(routed.values())
    return {
        "draft": shown(draft),
        "version": version,
        "requests": requests,
        "share": requests / total if total else None,
        "note": note,
        **Counts.of(stats.by_version.get(version, AcceptanceCounts())).rates(),
    }


def note(told: Mapping[str, Any]) -> str:
    """What the learner says of a class."""
    learned = f"{told.get('requests', 0)} requests, {told.get('updates', 0)} updates"
    if not told.get("serving"):
        return f"learns: {learned}"
    gain = told.get("gain")
    return learned if gain is None else f"gain {gain:+.4f}, {learned}"
