"""Decision about a candidate on recent held-out traffic, without serving a token.

Both drafts are scored at the same positions of the same served texts; the differences are paired by
request.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

import numpy as np
import torch

from draftsmith.distill.buffer.traffic import ServedText, samplers_of
from draftsmith.distill.config import GateConfig
from draftsmith.distill.gate.scoring import Scored, Scorer, score_together
from draftsmith.distill.gate.sequential import Evidence


class Comparison(NamedTuple):
    """Comparison paired by request: `gain` is the mean over requests of the mean difference over
    their positions."""

    gain: float
    # bound on the chance of so much gain, or loss if it is one, if there were no difference
    p_value: float
    requests: int
    positions: int
    first: float  # mean over positions
    second: float


def compare(first: Sequence[np.ndarray], second: Sequence[np.ndarray]) -> Comparison:
    """Compares `second` with `first`, one array per request, the same positions in both.

    If neither is better, swapping their names changes nothing, so that each request's difference d
    is as likely as -d. Then P(sum d >= s) <= exp(-s^2 / (2 sum d^2)), and so for -s, whatever the
    sizes of the differences and however few.
    """
    pairs = [(a, b) for a, b in zip(first, second, strict=True) if len(a)]
    if not pairs:
        return Comparison(0.0, 1.0, 0, 0, math.nan, math.nan)
    differences = np.array([difference(a, b) for a, b in pairs])
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


def difference(first: np.ndarray, second: np.ndarray) -> float:
    """Mean difference over the positions of one request."""
    return float(np.mean(second - first))


def differences_of(
    texts: Sequence[ServedText], first: Sequence[np.ndarray], second: Sequence[np.ndarray]
) -> dict[str, float]:
    """Differences by request, of requests with a scored position."""
    return {
        text.request: difference(a, b)
        for text, a, b in zip(texts, first, second, strict=True)
        if len(a)
    }


@dataclass(frozen=True)
class Decision:
    decision: str  # accept, hold or refuse
    reason: str
    comparison: Comparison | None = None
    evidence: float = math.nan  # for this line of candidates, over all looks; see `sequential.py`
    level: float = math.nan  # what its inverse is held against
    # rounds of the texts by how their engines draft, which alpha is for
    samplers: Mapping[str, int] = field(default_factory=dict)
    # scores of the candidate on the texts, for the version that it may become
    judged: Scorer | None = field(default=None, compare=False, repr=False)
    num_fresh: int = 0  # texts of this look that the candidate was trained on since

    @property
    def p_value(self) -> float:
        """Bound on the chance of so much evidence at any look ever, if no candidate were better."""
        return min(1.0, 1 / self.evidence) if self.evidence > 0 else 1.0

    def to_dict(self) -> dict[str, Any]:
        numbers = self.comparison._asdict() if self.comparison else {}
        renamed = {"first": "alpha_live", "second": "alpha_candidate"}
        return {
            "decision": self.decision,
            "reason": self.reason,
            **{renamed.get(name, name): value for name, value in numbers.items()},
            "p_value": self.p_value,
            "evidence": self.evidence,
            "level": self.level,
            "samplers": dict(self.samplers),
            "fresh_requests": self.num_fresh,
        }


class ScoredPairs(NamedTuple):
    """Scores of both drafts on the texts that agree with the target."""

    texts: list[ServedText]
    live: list[Scored]
    candidate: list[Scored]

    @property
    def alphas(self) -> tuple[list[np.ndarray], list[np.ndarray]]:
        return [one.alpha for one in self.live], [one.alpha for one in self.candidate]

    @property
    def differences(self) -> dict[str, float]:
        return differences_of(self.texts, *self.alphas)


def pairs_of(
    live: Scorer, candidate: Scorer, texts: Sequence[ServedText], *, max_depth: int
) -> ScoredPairs:
    scored, judged = score_together([live, candidate], texts, max_depth=max_depth)
    agreeing = [index for index, one in enumerate(scored) if one.is_consistent]
    return ScoredPairs(
        [texts[index] for index in agreeing],
        [scored[index] for index in agreeing],
        [judged[index] for index in agreeing],
    )


def decide(
    live: Scorer,
    candidate: torch.nn.Module,
    texts: Sequence[ServedText],
    config: GateConfig,
    *,
    max_depth: int,
    evidence: Evidence,
) -> Decision:
    """Decides on a candidate. `evidence` is of all looks since the last promotion; this look is
    added to it."""
    if not all(bool(torch.isfinite(parameter).all()) for parameter in candidate.parameters()):
        return Decision("refuse", "the candidate has weights that are not finite")
    if len(texts) < config.requests:
        return Decision("hold", f"{len(texts)} held-out requests, {config.requests} are needed")
    judge = live.of(candidate)
    pairs = pairs_of(live, judge, texts, max_depth=max_depth)
    if len(pairs.texts) < config.requests:
        count = len(texts) - len(pairs.texts)
        return Decision(
            "refuse",
            f"{count} of {len(texts)} held-out requests contradict this target in their logged "
            "distributions",
        )
    if not all(one.is_finite for one in pairs.candidate):
        return Decision("refuse", "the candidate gives distributions that are not finite")
    num_fresh = len(evidence.fresh)
    value = evidence.look(pairs.differences, config.error)
    return dataclasses.replace(
        weigh(compare(*pairs.alphas), value, config),
        samplers=samplers_of(pairs.texts),
        judged=judge,
        num_fresh=num_fresh,
    )


def weigh(comparison: Comparison, evidence: float, config: GateConfig) -> Decision:
    decision = Decision("hold", "", comparison, evidence, config.error)
    if comparison.requests < config.requests:
        return dataclasses.replace(
            decision, reason=f"{comparison.requests} scored requests, {config.requests} are needed"
        )
    if comparison.gain <= 0:
        return dataclasses.replace(decision, reason="no gain")
    if comparison.gain < config.gain:
        return dataclasses.replace(decision, reason=f"a gain below {config.gain}")
    if evidence * config.error < 1:
        return dataclasses.replace(decision, reason="a gain without enough evidence")
    return dataclasses.replace(decision, decision="accept", reason="a gain with evidence")


def regate(
    live: Scorer, texts: Sequence[ServedText], config: GateConfig, *, max_depth: int
) -> Decision:
    """Decides on publishing the live draft again. `texts` are held-out ones, scored under the new
    target, of it or of weights that it had before. They have to predict the floor."""
    alphas = alphas_of(live, texts, max_depth=max_depth)
    if len(alphas) < config.requests:
        return Decision(
            "hold",
            f"quarantine: {len(alphas)} requests scored under the new target, {config.requests} "
            "are needed",
        )
    alpha = float(np.concatenate(alphas).mean())
    measured = f"alpha {alpha:.3f} on {len(alphas)} requests under the new target"
    # Written so that NaN does not pass.
    if not alpha >= config.floor:
        return Decision("hold", f"quarantine: {measured}, below {config.floor}")
    return Decision("accept", f"goes on being served: {measured}")


def alphas_of(live: Scorer, texts: Sequence[ServedText], *, max_depth: int) -> list[np.ndarray]:
    """alpha at the positions of each text that has some and agrees with the target."""
    scored = live.score(texts, max_depth=max_depth)
    return [one.alpha for one in scored if one.is_consistent and len(one.alpha)]


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
