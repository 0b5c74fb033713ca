"""Evidence that one draft is accepted more than another, which may be looked at after every
request, for as long as one likes.

Each request gives one difference d between two drafts. If neither is better, swapping their names
changes nothing: given its size and all that came before, d is positive as often as negative. A bet
that pays tanh(c d) per unit of stake is then fair whatever c is, as long as c does not depend on
signs that are still unseen, and the money won from a stake of 1 passes 1 / error with at most the
chance `error`, at any time ever (Ville's inequality). So nothing is paid for a further look.

Answers turn: candidates improve, traffic changes. What was lost while the answer was another must
not weigh on it for ever, so a stake is bet bit by bit: the share 1 / (n (n + 1)) of look n is bet
from then on, on each request once (`TurningEvidence`). Of a line of candidates this is half of the
stake; the shares of the other half are bet on the whole window anew, each time by the candidate of
the moment, and what they brought is put aside.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field

import numpy as np

# Of logs of money: beyond it nothing is decided differently, and exp would overflow.
MOST_LOG = 500.0
# Differences of fresh texts that wait for a look; older ones are dropped.
MOST_FRESH = 512
# Sizes of the bets, in units of one over the typical |d|: an advantage of mu such units is found
# fastest with a bet of about mu.
BETS = (0.1, 0.3, 1.0)
BOUNDED_BETS = (0.1, 0.3, 0.9)


@dataclass
class TurningEvidence:
    """Evidence that one of two drafts is accepted more from some request on, whatever was before.
    `value` is the money: the chance that it ever reaches x is 1 / x."""

    looks: int = 0
    money: list[float] = field(default_factory=lambda: [0.0] * len(BETS))
    seen: list[str] = field(default_factory=list)  # requests of the latest window

    @property
    def value(self) -> float:
        return sum(self.money)

    def look(self, differences: Mapping[str, float]) -> float:
        """Adds a look and returns the new `value`. `differences` are of the requests of the window,
        oldest first, each of which is bet on once. Sizes of bets go by the window, so that they
        turn with it."""
        self.looks += 1
        stake = share_of(self.looks) / len(BETS)
        window = np.array(list(differences.values()))
        new = np.array([d for request, d in differences.items() if request not in self.seen])
        typical = math.sqrt(float((window**2).mean())) if window.any() else 1.0
        won = [math.exp(min(MOST_LOG, log_won(new / typical, bet))) for bet in BETS]
        self.money = [
            min(math.exp(MOST_LOG), (before + stake) * one)
            for before, one in zip(self.money, won, strict=True)
        ]
        self.seen = list(differences)
        return self.value

    def give_up(self) -> None:
        """Gives up winnings, not losses."""
        staked = (1 - 1 / (self.looks + 1)) / len(BETS)
        self.money = [min(money, staked) for money in self.money]


@dataclass
class Evidence:
    """Evidence that one of a line of candidates is better than the live draft, from the last
    promotion on."""

    once: TurningEvidence = field(default_factory=TurningEvidence)
    aside: float = 0.0  # won by the bets on whole windows
    # by request: differences of texts before the candidate was trained on them, for the next look
    fresh: dict[str, float] = field(default_factory=dict)

    @property
    def value(self) -> float:
        return 0.5 * self.once.value + 0.5 * self.aside

    def add_fresh(self, differences: Mapping[str, float]) -> None:
        """Keeps differences of new training texts, by the candidate before it was trained on them,
        for the next look. Each is bet on once and never again: a window that is bet on anew holds
        no text that the candidate was trained on."""
        kept = list((self.fresh | dict(differences)).items())
        self.fresh = dict(kept[-MOST_FRESH:])

    def look(self, differences: Mapping[str, float], error: float) -> float:
        """Adds a look, as `TurningEvidence.look`, at the held-out window and the fresh texts since
        the look before; the returned value is compared with 1 / error."""
        self.once.look({**self.fresh, **differences})
        self.fresh = {}
        self._bet_anew(np.array(list(differences.values())), error)
        return self.value

    def _bet_anew(self, window: np.ndarray, error: float) -> None:
        share = share_of(self.once.looks)
        squares = float((window**2).sum())
        # exp(c s - c^2 V / 2), which a fair bet of this size never falls below, is largest at the
        # level for this c.
        bet = math.sqrt(2 * math.log(2 / (error * share)) / squares) if squares > 0 else 0.0
        self.aside += share * math.exp(min(MOST_LOG, log_won(window, bet)))

    def new_candidate(self) -> None:
        """Gives up the winnings of the candidates before, since another one takes their place."""
        self.once.give_up()
        self.aside = 0.0
        self.fresh = {}


def share_of(look: int) -> float:
    """Share of the stake that is bet from a look on: all shares together are 1."""
    return 1 / (look * (look + 1))


def log_won(differences: np.ndarray, bet: float) -> float:
    """Log of what a stake of 1 becomes when all of it is bet on one after another. 1 + tanh(x) = 2
    / (1 + exp(-2 x))."""
    return float((math.log(2) - np.logaddexp(0.0, -2 * bet * differences)).sum())


@dataclass
class BoundedEvidence:
    """Evidence from differences in [-1, 1] that are zero on average if all is well, and need not be
    symmetric, such as alpha minus acceptance. A bet that pays c d is then fair, for any c in (0,
    1), if it does not depend on the size of its own d."""

    log_wealth: list[float] = field(default_factory=lambda: [0.0] * len(BOUNDED_BETS))
    seen: list[str] = field(default_factory=list)

    @property
    def value(self) -> float:
        return float(np.exp(np.minimum(self.log_wealth, MOST_LOG)).mean())

    def look(self, differences: Mapping[str, float]) -> float:
        """Adds a look, as `Evidence.look`, each request once."""
        new = np.array([d for request, d in differences.items() if request not in self.seen])
        won = np.log1p(np.outer(BOUNDED_BETS, new)).sum(axis=1)
        self.log_wealth = (self.log_wealth + won).tolist()
        self.seen = list(differences)
        return self.value


@dataclass
class Ledger:
    """Evidence under one live version: for the candidate against it, and for earlier versions
    against it."""

    gate: Evidence = field(default_factory=Evidence)
    # the live draft is accepted less than it scores
    served: BoundedEvidence = field(default_factory=BoundedEvidence)
    # an earlier version, by its number, scores more
    earlier: dict[str, TurningEvidence] = field(default_factory=dict)

    def against(self, version: int) -> TurningEvidence:
        return self.earlier.setdefault(str(version), TurningEvidence())
