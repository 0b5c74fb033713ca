"""Whether a candidate may replace the live draft, decided on recent held-out traffic without serving a token.

Both drafts are scored at the same positions of the same served texts; the differences are paired by request.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import torch

from draftsmith.distill.config import GateConfig
from draftsmith.distill.scoring import Scorer
from draftsmith.distill.traffic import ServedText


class Comparison(NamedTuple):
    """Paired by request: `gain` is the mean over requests of the mean difference over their positions."""

    gain: float
    p_value: float  # bound on the chance of so much gain, or loss if it is one, if there were no difference
    requests: int
    positions: int
    first: float  # mean over positions
    second: float


def compare(first: Sequence[np.ndarray], second: Sequence[np.ndarray]) -> Comparison:
    """Does `second` exceed `first`? One array a request, the same positions in both.

    If neither is better, swapping their names changes nothing, so that each request's difference d is as likely as -d.
    Then P(sum d >= s) <= exp(-s^2 / (2 sum d^2)), and so for -s, whatever the sizes of the differences and however few.
    """
    pairs = [(a, b) for a, b in zip(first, second, strict=True) if len(a)]
    if not pairs:
        return Comparison(0.0, 1.0, 0, 0, math.nan, math.nan)
    differences = np.array([float(np.mean(b - a)) for a, b in pairs])
    total, square = float(differences.sum()), float((differences**2).sum())
    p_value = math.exp(-(total**2) / (2 * square)) if square > 0 else 1.0
    everything = [np.concatenate(side) for side in zip(*pairs, strict=True)]
    return Comparison(
        float(differences.mean()),
        p_value,
        len(pairs),
        len(everything[0]),
        float(everything[0].mean()),
        float(everything[1].mean()),
    )


@dataclass(frozen=True)
class Decision:
    decision: str  # accept, hold or refuse
    reason: str
    comparison: Comparison | None = None
    level: float = math.nan  # what the p-value was held against

    def to_dict(self) -> dict[str, Any]:
        numbers = self.comparison._asdict() if self.comparison else {}
        renamed = {"first": "alpha_live", "second": "alpha_candidate"}
        return {
            "decision": self.decision,
            "reason": self.reason,
            **{renamed.get(name, name): value for name, value in numbers.items()},
            "level": self.level,
        }


def decide(
    live: Scorer, candidate: torch.nn.Module, texts: Sequence[ServedText], config: GateConfig, *, max_depth: int, looks: int
) -> Decision:
    """`looks` counts the decisions since the last promotion, this one included: the allowed error is spread over all of them,
    error / (looks * (looks + 1)) each, which sums to `error` however many there will be."""
    if not all(bool(torch.isfinite(parameter).all()) for parameter in candidate.parameters()):
        return Decision("refuse", "the candidate has weights that are not finite")
    if len(texts) < config.requests:
        return Decision("hold", f"{len(texts)} held-out requests, {config.requests} are needed")
    scored = live.score(texts, max_depth=max_depth)
    agreeing = [index for index, one in enumerate(scored) if one.is_consistent]
    if len(agreeing) < config.requests:
        count = len(texts) - len(agreeing)
        return Decision("refuse", f"{count} of {len(texts)} held-out requests contradict this target in their logged laws")
    chosen = [texts[index] for index in agreeing]
    new = Scorer(candidate, live.target, max_length=live.max_length).score(chosen, max_depth=max_depth)
    if any(np.isnan(one.alpha).any() for one in new):
        return Decision("refuse", "the candidate gives laws that are not finite")
    return weigh(compare([scored[index].alpha for index in agreeing], [one.alpha for one in new]), config, looks)


def weigh(comparison: Comparison, config: GateConfig, looks: int) -> Decision:
    level = config.error / (looks * (looks + 1))
    decision = Decision("hold", "", comparison, level)
    if comparison.requests < config.requests:
        return dataclasses.replace(decision, reason=f"{comparison.requests} scored requests, {config.requests} are needed")
    if comparison.gain <= 0:
        return dataclasses.replace(decision, reason="no gain")
    if comparison.gain < config.gain:
        return dataclasses.replace(decision, reason=f"a gain below {config.gain}")
    if comparison.p_value > level:
        return dataclasses.replace(decision, reason="a gain without enough evidence")
    return dataclasses.replace(decision, decision="accept", reason="a gain with evidence")
