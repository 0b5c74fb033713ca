"""k for the most tokens per second, from the measured time of a round at each k and the survival of
each class's drafts."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import NamedTuple

from draftsmith.serve.control.control import (
    MAX_AUTO_K,
    RoundPlan,
    RoundResult,
    RowBudget,
    RowResult,
)
from draftsmith.serve.control.latency import LatencyTable, MarginalCost, bucket_of, nearest
from draftsmith.serve.control.survival import Survival

DECIDE_EVERY = 8  # rounds of a bucket
# Least relative gain in tokens per second for a change of k.
GAIN_WANTED = 0.02
# Probes of other k may cost this share of the time, and a few rounds to begin with.
PROBE_SHARE = 0.004
FIRST_PROBES = 5.0
PROBE_ROUNDS = 3
MOST_SURVIVAL = 0.9  # bound of `least_survival`: k = 0 covers drafts that never pay
SHORTEST_BACKOFF, LONGEST_BACKOFF = 16, 512  # rounds of a bucket between two probes of the same k


class _Load(NamedTuple):
    """The rows of a round, equal ones counted together."""

    rows: Counter[RowBudget]
    num_rows: int
    deepest: int


class _PerClassK(NamedTuple):
    """A k for each class."""

    shares: dict[str, int]
    rate: float  # tokens per second
    seconds: float  # of a round


@dataclass(slots=True)
class _Probe:
    k: int
    rounds_left: float
    rate: float  # tokens per second at the k it departs from
    prefill_s: float  # of each round, whatever k


@dataclass(slots=True)
class _Bucket:
    k: int
    rounds: int = 0
    due: int = 0  # round of the next decision
    probe: _Probe | None = None
    tried: dict[int, int] = field(default_factory=dict)  # round of the last probe of each k
    backoffs: dict[int, int] = field(default_factory=dict)
    per_class: _PerClassK | None = None  # set when it is better than any one k
    cost: MarginalCost = field(default_factory=MarginalCost)
    # a draft less likely to be kept brings fewer tokens than its time is worth
    least_survival: float = 0.0
    per_class_error: float = 1.0  # measured time over expected time of rounds with a k per class


@dataclass(frozen=True, slots=True)
class _Plan(RoundPlan):
    """A round is booked in the bucket it was chosen for, whatever went through the target in the
    end: were it booked elsewhere, the k chosen here would never be measured, and never be left."""

    number: int  # of the bucket
    probe: _Probe | None = None
    per_class: _PerClassK | None = None  # what the rows got, if not one k


class AutoControl:
    """k = 0 is one of the choices and is measured again and again, so speculation that does not pay
    is left; the probes themselves may cost `PROBE_SHARE` of the time and no more. `start` is the k
    before anything is known.
    """

    def __init__(self, start: int = 3):
        self.start = start
        self.latency, self.survival = LatencyTable(), Survival()
        self._buckets: dict[int, _Bucket] = {}
        # fading sums: reading text late, and rounds that drafted
        self._catch_up_s = self._drafting_s = 0.0
        # One account for all buckets: a load that passes through many would pay for little but the
        # first probes of each.
        self._spent_s = 0.0
        # what probes cost beyond what the same tokens would have taken at the bucket's k
        self._lost_s = 0.0

    def choose(self, budgets: Sequence[RowBudget], num_tokens: int) -> RoundPlan:
        deepest = min(max((budget.most for budget in budgets), default=0), MAX_AUTO_K)
        number = bucket_of(num_tokens)
        if deepest == 0:
            return _Plan([0] * len(budgets), number)
        bucket = self._bucket(number)
        bucket.rounds += 1
        if bucket.probe is None and bucket.rounds >= bucket.due:
            self._decide(number, bucket, _Load(Counter(budgets), len(budgets), deepest))
        if bucket.probe is None and bucket.per_class is not None:
            shares = [
                min(bucket.per_class.shares.get(budget.request_class, bucket.k), budget.most)
                for budget in budgets
            ]
            return _Plan(
                shares, number, per_class=bucket.per_class, least_survival=bucket.least_survival
            )
        k = bucket.k if bucket.probe is None else bucket.probe.k
        return _Plan(
            [min(k, budget.most) for budget in budgets],
            number,
            bucket.probe,
            least_survival=bucket.least_survival,
        )

    def observe(self, result: RoundResult) -> None:
        for row, times in Counter(result.offers).items():
            if row.accepted is not None:
                self.survival.add(row.request_class, row.offered, row.accepted, times)
        plan = (
            result.plan
            if isinstance(result.plan, _Plan)
            else _Plan([], bucket_of(result.num_tokens))
        )
        number, bucket = plan.number, self._bucket(plan.number)
        self._spent_s += result.seconds
        if result.k > 0:
            late_s = (
                max(0.0, result.seconds - self.latency.seconds(number, result.k))
                if result.catching_up
                else 0.0
            )
            self._catch_up_s = 0.995 * self._catch_up_s + late_s
            self._drafting_s = 0.995 * self._drafting_s + result.seconds
        if not result.catching_up:
            self._measure(plan, bucket, result)
            if result.k > 0 and result.num_drafted is not None:
                # A stall of the machine is not the price of a draft.
                bucket.cost.add(
                    result.num_drafted,
                    min(result.seconds, 2.0 * self.latency.seconds(number, result.k)),
                )
        if plan.probe is not None and plan.probe is bucket.probe:
            self._account(bucket, plan.probe, result)

    def new_draft(self) -> None:
        self.survival.doubt(0.05)
        for bucket in self._buckets.values():
            bucket.backoffs.clear()
            bucket.tried.clear()

    def _bucket(self, number: int) -> _Bucket:
        if number not in self._buckets:
            near = nearest(number, self._buckets)
            self._buckets[number] = _Bucket(self.start if near is None else self._buckets[near].k)
        return self._buckets[number]

    def _measure(self, plan: _Plan, bucket: _Bucket, result: RoundResult) -> None:
        if plan.per_class is None:
            self.latency.add(plan.number, result.k, result.seconds)
        else:
            bucket.per_class_error += 0.1 * (
                min(result.seconds / plan.per_class.seconds, 2.0) - bucket.per_class_error
            )

    def _account(self, bucket: _Bucket, probe: _Probe, result: RoundResult) -> None:
        tokens = result.num_rows + sum(map(self._kept, result.offers))
        self._lost_s += max(0.0, result.seconds - probe.prefill_s - tokens / probe.rate)
        # A round that also catches up measures nothing, nor does one whose rows may not draft so
        # deep, but a probe must end even where every round is like that.
        probe.rounds_left -= 0.25 if result.catching_up or result.k != probe.k else 1.0
        if probe.rounds_left <= 0:
            bucket.probe, bucket.due = None, 0

    def _kept(self, row: RowResult) -> float:
        """Accepted drafts of a row; as many as are expected where they may not be counted."""
        if row.accepted is None:
            return sum(self.survival.chances(row.request_class, row.offered))
        return row.accepted

    def _rate(self, number: int, load: _Load, k: int) -> float:
        """Expected tokens per second at depth k, excluding prefill time, which would hide the cost
        of drafting."""
        tokens = float(load.num_rows)
        for budget, count in load.rows.items():
            tokens += count * sum(self.survival.chances(budget.request_class, min(k, budget.most)))
        seconds = self.latency.seconds(number, k) * (self._lateness() if k > 0 else 1.0)
        # Measurements of two k may contradict each other by more than a round without prompts
        # takes.
        return tokens / max(seconds - self._prefill_s(number, load), 0.1 * seconds)

    def _prefill_s(self, number: int, load: _Load) -> float:
        """Prefill time of a round."""
        alone = bucket_of(load.num_rows)
        if alone >= number:
            return 0.0
        whole_s = self.latency.seconds(number, 0)
        return max(0.0, whole_s - min(self.latency.seconds(alone, 0), whole_s))

    def _lateness(self) -> float:
        """Factor by which reading text late has stretched the time of rounds that draft."""
        if self._drafting_s == 0:
            return 1.0
        return self._drafting_s / max(self._drafting_s - self._catch_up_s, 0.1 * self._drafting_s)

    def _decide(self, number: int, bucket: _Bucket, load: _Load) -> None:
        now = bucket.k = min(bucket.k, load.deepest)
        if not self.latency.measured(number, now):
            # Rounds with a new prompt may never be measured, since the draft reads it too: they use
            # the k of a measured load.
            bucket.k = min(self._known_k(number, now), load.deepest)
            return
        bucket.due = bucket.rounds + DECIDE_EVERY
        rates = [self._rate(number, load, k) for k in range(load.deepest + 1)]
        best = max(range(len(rates)), key=rates.__getitem__)
        if rates[best] > (1.0 + GAIN_WANTED) * rates[now]:
            bucket.backoffs.pop(now, None)
            bucket.k = best
        bucket.least_survival = min(MOST_SURVIVAL, rates[bucket.k] * bucket.cost.seconds)
        bucket.per_class = self._per_class_k(number, bucket, load, rates)
        self._consider_probe(number, bucket, rates, self._prefill_s(number, load))

    def _known_k(self, number: int, otherwise: int) -> int:
        """The k of the bucket most like it whose k is measured."""
        near = nearest(
            number,
            [
                other
                for other, bucket in self._buckets.items()
                if self.latency.measured(other, bucket.k)
            ],
        )
        return otherwise if near is None else self._buckets[near].k

    def _consider_probe(
        self, number: int, bucket: _Bucket, rates: list[float], prefill_s: float
    ) -> None:
        """Probe k = 0, the neighbours and the best drafting k in turns; one that loses is probed
        less and less often."""
        now = bucket.k
        others = {0, now - 1, now, now + 1, max(range(1, len(rates)), key=rates.__getitem__)}
        if bucket.per_class is None:
            others.discard(now)  # its rounds are measured anyway
        for k in sorted(others, key=lambda k: bucket.tried.get(k, -1)):
            backoff = bucket.backoffs.get(k, SHORTEST_BACKOFF)
            if not 0 <= k < len(rates) or (
                k in bucket.tried and bucket.rounds - bucket.tried[k] < backoff
            ):
                continue
            # The first round of a kind does not count, and its time is a guess.
            known = self.latency.measured(number, k)
            num_rounds, doubt = (PROBE_ROUNDS, 1.0) if known else (PROBE_ROUNDS + 1, 1.3)
            loss_s = num_rounds * max(
                0.0,
                (doubt * self.latency.seconds(number, k) - prefill_s)
                * (1.0 - rates[k] / rates[now]),
            )
            allowed_s = PROBE_SHARE * self._spent_s + FIRST_PROBES * self.latency.seconds(
                number, now
            )
            # The time of rounds without drafts is the measure of all others: it is measured even
            # without credit.
            is_measure = k == 0 and not known
            if not is_measure and self._lost_s + loss_s > allowed_s:
                continue
            if now == 0:
                # Only probes draft now, so what earlier ones saw is old.
                self.survival.doubt(0.5)
            bucket.probe = _Probe(k, num_rounds, rates[now], prefill_s)
            bucket.tried[k], bucket.backoffs[k] = bucket.rounds, min(2 * backoff, LONGEST_BACKOFF)
            return

    def _per_class_k(
        self, number: int, bucket: _Bucket, load: _Load, rates: list[float]
    ) -> _PerClassK | None:
        """Classes take the drafts that bring more than their time costs at the round's own rate.
        None if one k does as well."""
        rows = Counter(budget.request_class for budget in load.rows.elements())
        if len(rows) == 1 or not all(self.latency.measured(number, k) for k in (0, 1, bucket.k)):
            return None
        round_s = [self.latency.seconds(number, k) for k in range(load.deepest + 1)]
        costs_s = [max(0.0, high_s - low_s) / load.num_rows for low_s, high_s in pairwise(round_s)]
        chances = {name: self.survival.chances(name, load.deepest) for name in rows}
        prefill_s = self._prefill_s(number, load)
        per_class = _PerClassK({}, rates[bucket.k], 0.0)
        for _ in range(3):
            shares = {name: _worthwhile(chances[name], costs_s, per_class.rate) for name in rows}
            tokens = load.num_rows + sum(
                count * sum(chances[name][: shares[name]]) for name, count in rows.items()
            )
            seconds = round_s[0] + sum(
                count * sum(costs_s[: shares[name]]) for name, count in rows.items()
            )
            per_class = _PerClassK(shares, tokens / (seconds - prefill_s), seconds)
        return (
            per_class
            if per_class.rate > (1.0 + GAIN_WANTED) * bucket.per_class_error * max(rates)
            else None
        )


def _worthwhile(chances: list[float], costs_s: list[float], rate: float) -> int:
    """The depth with the largest sum of tokens won less tokens that the time would have brought
    otherwise."""
    surplus, best, depth = 0.0, 0.0, 0
    for index, (chance, cost_s) in enumerate(zip(chances, costs_s, strict=True)):
        surplus += chance - rate * cost_s
        if surplus > best:
            best, depth = surplus, index + 1
    return depth
