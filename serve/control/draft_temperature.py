"""The temperature that drafts are drawn at: the request's own, greedy, or tuned while serving.
Torch-free.

Verification uses the distribution that a draft was drawn from, so any choice is lossless as long as
it is made before the draw.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from draftsmith.serve.sampling.params import MIN_TEMPERATURE, SamplingParams

FACTORS = (1.0, 0.8, 0.6, 1.25)  # of the request's temperature
MEMORY = 4000.0  # first drafts
TRIAL_EVERY = 12  # rounds
MIN_SEEN = 60.0


@dataclass(slots=True)
class _Arm:
    """Share of first drafted tokens that was kept: later ones are not reached equally often by
    all."""

    offered: float = 0.0
    kept: float = 0.0

    def add(self, offered: int, kept: int) -> None:
        fade = 1.0 - min(offered / MEMORY, 1.0)
        self.offered, self.kept = fade * self.offered + offered, fade * self.kept + kept

    @property
    def alpha(self) -> float:
        return (self.kept + 1.0) / (self.offered + 2.0)


class DraftTemperature:
    """`greedy`: drafts are the draft's likeliest tokens. `tune`: of a few multiples of the
    request's temperature the one whose first drafts are kept most often; every `TRIAL_EVERY`-th
    round asks another."""

    def __init__(self, *, greedy: bool = False, tune: bool = False):
        self.greedy, self.tune = greedy, tune and not greedy
        self.best = 0  # index into FACTORS
        self._arms = [_Arm() for _ in FACTORS]
        self._now = 0
        self._rounds = 0

    @property
    def factor(self) -> float:
        return FACTORS[self.best]

    def temperatures(self, params: Sequence[SamplingParams]) -> list[float]:
        """Temperatures of the drafting rows; called once per round, before anything is drawn."""
        self._rounds += 1
        self._now = self.best
        if self.tune and self._rounds % TRIAL_EVERY == 0:
            others = [index for index in range(len(FACTORS)) if index != self.best]
            self._now = others[self._rounds // TRIAL_EVERY % len(others)]
        return [self._temperature(each) for each in params]

    def plain(self, params: Sequence[SamplingParams]) -> bool:
        """Drafts of these requests are drawn at the requests' own temperatures."""
        return (
            not self.greedy
            and not self.tune
            and all(each.draft_temperature is None for each in params)
        )

    def observe(self, params: Sequence[SamplingParams], accepted: Sequence[int]) -> None:
        """Count the acceptance of that round; rows that drafted nothing must be left out."""
        if not self.tune:
            return
        kept = [min(count, 1) for each, count in zip(params, accepted, strict=True) if _tuned(each)]
        if kept:
            self._arms[self._now].add(len(kept), sum(kept))
            self._choose()

    def new_draft(self) -> None:
        self._arms = [_Arm(arm.offered * 0.02, arm.kept * 0.02) for arm in self._arms]

    def _temperature(self, params: SamplingParams) -> float:
        if params.draft_temperature is not None:
            return params.draft_temperature
        if self.greedy or params.temperature == 0:
            return 0.0
        return (
            max(params.temperature * FACTORS[self._now], MIN_TEMPERATURE)
            if self.tune
            else params.temperature
        )

    def _choose(self) -> None:
        best = self._arms[self.best]
        for index, arm in enumerate(self._arms):
            if min(arm.offered, best.offered) < MIN_SEEN:
                continue
            doubt = math.sqrt(
                sum(each.alpha * (1.0 - each.alpha) / each.offered for each in (arm, best))
            )
            if arm.alpha > best.alpha + 1.5 * doubt:
                self.best, best = index, arm


def _tuned(params: SamplingParams) -> bool:
    return params.draft_temperature is None and params.temperature > 0
