"""Did a published version turn out worse? Judged on held-out traffic from after its publication.

Live acceptance alone cannot tell: it falls as well when the traffic gets harder. Two comparisons can, each paired by request:
what the version was accepted with against what it should have been (served wrongly), and its parent on the same records (a
gain that did not last).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from draftsmith.distill.config import GateConfig
from draftsmith.distill.gate import Comparison, compare, differences_of
from draftsmith.distill.scoring import Scorer
from draftsmith.distill.sequential import Ledger
from draftsmith.distill.traffic import ServedText


@dataclass(frozen=True)
class Watched:
    reason: str  # "" when all is well
    acceptance: float  # share of the offered tokens that the live version really had accepted
    served: Comparison  # real acceptance -> alpha it should have had
    parent: Comparison | None  # live -> parent
    evidence: Ledger

    def to_dict(self) -> dict[str, Any]:
        return {
            "reason": self.reason,
            "acceptance": self.acceptance,
            "alpha_scored": self.served.second,
            "served_gap": self.served.gain,
            "served_evidence": self.evidence.served.value,
            "parent_gain": self.parent.gain if self.parent else None,
            "parent_evidence": self.evidence.parent.value if self.parent else None,
            "requests": self.served.requests,
        }


def served_by(texts: Sequence[ServedText], version: str) -> list[ServedText]:
    return [text for text in texts if any(record.draft_version == version for record in text.records)]


def watch(
    live: Scorer,
    parent: Scorer | None,
    texts: Sequence[ServedText],
    config: GateConfig,
    *,
    version: str,
    max_depth: int,
    evidence: Ledger,
) -> Watched:
    """`texts` were served by `version`, in part at least. A reason is given only for a loss above `config.drop` with evidence,
    to which this look is added."""
    everything = live.score(texts, max_depth=max_depth)
    agreeing = [index for index, one in enumerate(everything) if one.is_consistent]
    texts, scored = [texts[index] for index in agreeing], [everything[index] for index in agreeing]
    mine = [np.array([name == version for name in one.version], dtype=bool) for one in scored]
    kept = [one.kept[chosen] for one, chosen in zip(scored, mine, strict=True)]
    should = [one.alpha[chosen] for one, chosen in zip(scored, mine, strict=True)]
    served = compare(kept, should)
    # Two questions share the error.
    error = config.error / 2
    evidence.served.look(differences_of(texts, kept, should))
    against_parent = None
    if parent is not None:
        old = parent.score(texts, max_depth=max_depth)
        now, before = [one.alpha for one in scored], [one.alpha for one in old]
        against_parent = compare(now, before)
        evidence.parent.look(differences_of(texts, now, before), error)
    reason = ""
    if is_loss(served, config) and evidence.served.value * error >= 1:
        reason = f"served alpha is {served.gain:.3f} below what the same draft scores on the same records"
    elif against_parent is not None and is_loss(against_parent, config) and evidence.parent.value * error >= 1:
        reason = f"the parent's alpha is {against_parent.gain:.3f} higher on the newest records"
    return Watched(reason, served.first, served, against_parent, evidence)


def is_loss(comparison: Comparison, config: GateConfig) -> bool:
    return comparison.requests >= config.requests and comparison.gain > config.drop
