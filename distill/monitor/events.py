"""Events of a verified position whose probabilities follow from the logged p and q.

Of every event 1[it happened] - its probability has mean 0 given all that came before the draw that
decides it. A position may be left out by any condition on what came before that draw, since such a
condition multiplies a difference of conditional mean 0 by a number that is settled already: the sum
over the kept positions stays a martingale, and z and evidence stay unbiased. Conditions here look
at p, q and the depth, and for `accepted`, decided by noise drawn after the drafted token x, at x.

- `accepted`: x is accepted; min(1, p(x) / q(x)). Of chains.
- `drafted`: x is among the likeliest half of q. Of chains that are drawn. A wrong q is accepted and
  replaced as it says: it shows only in what was drafted.
- `replaced`: x is rejected and the token in its place is one of those, logged in p and q, that are
  likelier under p; sum max(p - q, 0) over them. Of chains.
- `residual`: the token in the place of a rejected x is one of these, and in that half of them where
  p / q is largest; the share of that half in the sum. Of chains. A server that replaces x by
  the noise that x was drawn with draws too much of this half: x was drawn over all that q holds
  likely.
- `emitted`: the token that stands there, accepted or not, is among the likeliest half of p, the
  target's distribution itself. Of chains and trees at every depth reached, and of blocks at the
  first one: how far a block is kept depends on the drafts behind.

Greedy positions have no chance in them: the token must be the argmax, see `greedy_violations`.

Of events with known probabilities: z, and evidence against these that may be looked at after every
record. A bet on an event of probability e multiplies its stake by exp(s happened) / (1 - e + e
exp(s)), for a strength s: fair at the stated e, whatever came before. The money of a stake of 1
passes 1 / error with at most the chance `error`, at any time ever (Ville's inequality), and so does
the mean over strengths and over kinds of events. Where e is known up to an error, a bet on more is
held against the largest e and a bet on less against the smallest, which only lowers the money:
rounding never becomes evidence.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np

from draftsmith.distill.monitor.positions import ARITHMETIC, NO_TAIL, ROUNDING, TIE, Positions

EVENTS = ("accepted", "drafted", "replaced", "residual", "emitted")
HALF = 0.5
# Pairs of logged tokens compared at once.
CHUNK = 2048
# In log-odds. A bias of d in events of variance v is found fastest with a strength near d / v.
STRENGTHS = np.array([sign * 0.02 * 2**step for sign in (1, -1) for step in range(7)])


class MonitorEvent(NamedTuple):
    """One kind of event at the positions `at`, which are all that are judged by it."""

    name: str
    at: np.ndarray  # [m] indices of positions
    happened: np.ndarray  # [m] bool
    chance: np.ndarray  # [m] float64
    error: np.ndarray  # [m] largest absolute error of `chance`


def events_of(positions: Positions, rules: np.ndarray) -> list[MonitorEvent]:
    """Events of positions [n] whose rounds were verified by `rules` [n]."""
    sampled = ~positions.greedy & positions.p_known & (positions.token >= 0)
    chain = sampled & (rules == "chain") & (positions.drafted >= 0)
    first = (rules == "block") & (positions.depth == 0)
    emitted = sampled & ((rules == "chain") | (rules == "tree") | first)
    return [
        _accepted(positions, chain & is_logged(positions)),
        _drafted(positions, chain & (positions.q_ids.shape[1] > 1) & _is_drawn(positions)),
        *_replaced(positions, chain & _has_q(positions)),
        _likeliest(positions, emitted),
    ]


def is_logged(positions: Positions) -> np.ndarray:
    """[n] bool: p(x) and q(x) are known."""
    return ~np.isnan(positions.p_drafted) & (positions.q_drafted > 0)


def _has_q(positions: Positions) -> np.ndarray:
    return positions.q[:, 0] > 0


def _is_drawn(positions: Positions) -> np.ndarray:
    """[n] bool: q is no single token."""
    return _has_q(positions) & (positions.q[:, 0] < 1 - ROUNDING)


def _accepted(positions: Positions, chosen: np.ndarray) -> MonitorEvent:
    (at,) = chosen.nonzero()
    p, q = positions.p_drafted[at], positions.q_drafted[at]
    chance = np.minimum(1.0, p / q)
    relative = np.where(positions.exact[at], ARITHMETIC, positions.p_error[at] + ROUNDING)
    # A ratio beyond 1 by more than its error is 1 exactly.
    error = np.where(p > q * (1 + relative), 0.0, relative * chance)
    return MonitorEvent("accepted", at, positions.accepted[at], chance, error)


def _drafted(positions: Positions, chosen: np.ndarray) -> MonitorEvent:
    (at,) = chosen.nonzero()
    happened, mass = _in_half(positions.q[at], positions.q_ids[at], positions.drafted[at])
    return MonitorEvent("drafted", at, happened, mass, ROUNDING * mass)


def _likeliest(positions: Positions, chosen: np.ndarray) -> MonitorEvent:
    (at,) = chosen.nonzero()
    happened, mass = _in_half(positions.p[at], positions.p_ids[at], positions.token[at])
    return MonitorEvent("emitted", at, happened, mass, positions.p_error[at] * mass)


def _in_half(
    probs: np.ndarray, ids: np.ndarray, tokens: np.ndarray
) -> tuple[np.ndarray, np.ndarray]:
    """True [n] for a token in the smallest beginning of its row of half the mass; its mass [n]."""
    inside = (probs.cumsum(axis=1) - probs < HALF) & (probs > 0)
    mass = np.minimum(1.0, (probs * inside).sum(axis=1))
    return ((ids == tokens[:, None]) & inside).any(axis=1), mass


def _replaced(positions: Positions, chosen: np.ndarray) -> Iterator[MonitorEvent]:
    """`replaced` and `residual`."""
    (at,) = chosen.nonzero()
    chunks = range(0, max(1, len(at)), CHUNK)
    parts = [_gain(positions, at[begin : begin + CHUNK]) for begin in chunks]
    for name, values in zip(("replaced", "residual"), zip(*parts)):
        yield MonitorEvent(name, *map(np.concatenate, zip(*values)))


def _gain(positions: Positions, at: np.ndarray) -> tuple[tuple[np.ndarray, ...], ...]:
    p_ids, p, q_ids, q = (
        values[at] for values in (positions.p_ids, positions.p, positions.q_ids, positions.q)
    )
    # The place of each token of p among those of q, by one search in pairs of row and token, which
    # are in order once each row is. What has no mass in q comes last in its row, under no token.
    rows = np.arange(len(at))[:, None]
    nothing = np.int64(max(p_ids.max(initial=0), q_ids.max(initial=0)) + 2)
    tokens = np.where(q > 0, q_ids + 1, nothing)
    order = tokens.argsort(axis=1)
    tokens, q = (np.take_along_axis(values, order, axis=1) for values in (tokens, q))
    keys = (rows * (nothing + 1) + tokens).ravel()
    wanted = rows * (nothing + 1) + p_ids + 1
    place = np.searchsorted(keys, wanted).clip(max=len(keys) - 1)
    listed = keys[place] == wanted
    other = np.where(listed, q.ravel()[place], 0.0)
    is_whole = positions.q_tail[at] < NO_TAIL
    likelier = (p > other) & (listed | is_whole[:, None])
    gain, errors = (p - other) * likelier, (positions.p_error[at] + ROUNDING)[:, None] * (p + other)
    stands = p_ids == positions.token[at][:, None]
    error = (errors * likelier).sum(axis=1) + NO_TAIL
    happened = ~positions.accepted[at] & (stands & likelier).any(axis=1)
    replaced = at, happened, np.minimum(gain.sum(axis=1), 1.0), error
    at, gain, errors, stands, error = (
        values[happened] for values in (at, gain, errors, stands, error)
    )
    half = _first_half(gain, by=(p / np.maximum(other, NO_TAIL))[happened])
    mass = gain.sum(axis=1)
    share = (gain * half).sum(axis=1) / mass
    error = ((errors * half).sum(axis=1) + share * error) / np.maximum(mass - error, NO_TAIL)
    return replaced, (at, (stands & half).any(axis=1), share, np.minimum(1.0, error))


def _first_half(mass: np.ndarray, *, by: np.ndarray) -> np.ndarray:
    """Smallest beginning [n, w] of half of each row's mass, largest `by` first."""
    order = np.argsort(-by * (mass > 0), axis=1, kind="stable")
    ordered = np.take_along_axis(mass, order, axis=1)
    inside = ordered.cumsum(axis=1) - ordered < HALF * mass.sum(axis=1)[:, None]
    found = np.zeros_like(inside)
    np.put_along_axis(found, order, inside, axis=1)
    return found & (mass > 0)


def greedy_of(positions: Positions) -> np.ndarray:
    """[n] bool: greedy positions whose argmax is no tie of rounded logprobs."""
    if positions.p.shape[1] < 2:
        return positions.greedy
    first, second = np.log(np.maximum(positions.p[:, :2], 1e-300)).T
    return positions.greedy & (first - second > TIE)


def greedy_violations(positions: Positions) -> np.ndarray:
    """[n] bool: the token that stands there is not the argmax."""
    return greedy_of(positions) & (positions.token != positions.p_ids[:, 0])


def impossible(positions: Positions) -> np.ndarray:
    """[n] bool: the token that stands there has no probability, cut by the request's filters."""
    inside = ((positions.p_ids == positions.token[:, None]) & (positions.p > 0)).any(axis=1)
    known = positions.p_known & ~positions.greedy & (positions.p_tail == 0)
    return known & (positions.token >= 0) & ~inside


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
