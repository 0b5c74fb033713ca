"""z of events with known probabilities, and evidence against these that may be looked at after
every record, for as long as one likes.

A bet on an event of probability e multiplies its stake by exp(s happened) / (1 - e + e exp(s)), for
a strength s: fair at the stated e, whatever came before. The money of a stake of 1 passes 1 / error
with at most the chance `error`, at any time ever (Ville's inequality), and so does the mean over
strengths and over kinds of events. Where e is known up to an error, a bet on more is held against
the largest e and a bet on less against the smallest, which only lowers the money: rounding never
becomes evidence.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field

import numpy as np

from draftsmith.distill.monitor.events import MonitorEvent

# In log-odds. A bias of d in events of variance v is found fastest with a strength near d / v.
STRENGTHS = np.array([sign * 0.02 * 2**step for sign in (1, -1) for step in range(7)])


@dataclass
class EvidenceCounts:
    """Sums over events of one kind."""

    count: int = 0
    happened: int = 0
    expected: float = 0.0
    variance: float = 0.0

    def add(self, event: MonitorEvent, chosen: np.ndarray) -> None:
        chance = event.chance[chosen]
        self.count += len(chance)
        self.happened += int(event.happened[chosen].sum())
        self.expected += float(chance.sum())
        self.variance += float((chance * (1 - chance)).sum())

    @property
    def z(self) -> float:
        """Standard deviations above the expected number; 0 where nothing is left to chance."""
        if self.variance <= 0:
            return 0.0
        return (self.happened - self.expected) / math.sqrt(self.variance)


@dataclass
class Bets:
    """Money of all strengths, as logarithms."""

    log_money: list[float] = field(default_factory=lambda: [0.0] * len(STRENGTHS))

    def add(self, event: MonitorEvent, chosen: np.ndarray) -> None:
        chance, error = event.chance[chosen, None], event.error[chosen, None]
        ups = STRENGTHS > 0
        most = np.where(ups, np.minimum(1.0, chance + error), np.maximum(0.0, chance - error))
        fair = np.log1p(most * np.expm1(STRENGTHS))
        won = event.happened[chosen, None] * STRENGTHS - fair
        self.log_money = (np.array(self.log_money) + won.sum(axis=0)).tolist()

    @property
    def log_evidence(self) -> float:
        return float(np.logaddexp.reduce(self.log_money)) - math.log(len(self.log_money))
