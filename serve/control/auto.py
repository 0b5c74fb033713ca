"""k for the most tokens per second.

Measure how long rounds of each load take at each k, predict tokens per second from that and from
the survival of each class's drafts, choose the best k, and probe others now and then.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import accumulate
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
PROBE_ROUNDS = 3  # and as many again where text is read late
SHORTEST_REST, LONGEST_REST = 16, 512  # rounds of a bucket between two probes of the same k
MOST_SURVIVAL = 0.9  # bound of `least_survival`: k = 0 covers drafts that never pay


class _Probe(NamedTuple):
    k: int
    rate: float  # tokens per second at the k it departs from
    prompts_s: float  # of each round, whatever k
    first_s: float  # that probes may cost beyond their share
    last: int  # round of the bucket after which it ends in any case


class _Rest(NamedTuple):
    until: int  # round of the bucket
    rounds: int  # after the next probe


_NONE = _Rest(0, SHORTEST_REST)


@dataclass(slots=True)
class _Bucket:
    """Rounds of about as many known tokens."""

    k: int
    rounds: int = 0
    due: int = 0  # round of the next decision
    probe: _Probe | None = None  # lasts until `due`
    rests: dict[int, _Rest] = field(default_factory=dict)  # of each k that was probed
    # a draft less likely to be kept brings fewer tokens than its time is worth
    least_survival: float = 0.0
    caps: dict[str, int] = field(default_factory=dict)  # k of classes whose drafts survive less
    cost: MarginalCost = field(default_factory=MarginalCost)

    def k_of(self, budget: RowBudget, k: int) -> int:
        return min(k, budget.most, self.caps.get(budget.request_class, k))


class _Load(NamedTuple):
    number: int  # of the bucket
    rows: Counter[RowBudget]  # equal ones counted together
    deepest: int


@dataclass(frozen=True, slots=True)
class _Plan(RoundPlan):
    """A round is measured in the bucket it was chosen for, whatever went through the target in the
    end: otherwise the k chosen here might never be measured, and never be left."""

    number: int
    probe: _Probe | None = None


class AutoControl:
    """k = 0 is one of the choices and is measured again and again, so speculation that does not pay
    is left; the probes themselves may cost `PROBE_SHARE` of the time and no more. `start` is the k
    before anything is known.
    """

    learns = True

    def __init__(self, start: int = 3):
        self.start = start
        self.latency, self.survival = LatencyTable(), Survival()
        self._buckets: dict[int, _Bucket] = {}
        # One account for all buckets: a load that passes through many would pay for little but the
        # first probes of each.
        self._spent_s = self._probes_s = 0.0
        # fading sums over rounds that drafted: expected, and beyond it where text was read late
        self._drafting_s = self._late_s = 0.0

    def choose(self, budgets: Sequence[RowBudget], num_tokens: int) -> RoundPlan:
        deepest = min(max((budget.most for budget in budgets), default=0), MAX_AUTO_K)
        number = bucket_of(num_tokens)
        if deepest == 0:
            return _Plan([0] * len(budgets), number)
        bucket = self._buckets.setdefault(number, _Bucket(self.start))
        bucket.rounds += 1
        if bucket.rounds >= bucket.due:
            self._decide(bucket, _Load(number, Counter(budgets), deepest))
        k = bucket.k if bucket.probe is None else bucket.probe.k
        ks = [bucket.k_of(budget, k) for budget in budgets]
        return _Plan(ks, number, bucket.probe, least_survival=bucket.least_survival)

    def observe(self, result: RoundResult) -> None:
        plan = result.plan
        number = plan.number if isinstance(plan, _Plan) else bucket_of(result.num_tokens)
        self._spent_s += result.seconds
        if isinstance(plan, _Plan) and plan.probe is not None:
            tokens = result.num_rows + sum(map(self._kept, result.offers))
            worth_s = plan.probe.prompts_s + tokens / plan.probe.rate
            self._probes_s += max(0.0, result.seconds - worth_s)
            bucket = self._buckets[number]
            if plan.probe.k > 0 and self._credit_s(plan.probe.first_s) < 0.0:
                bucket.due = bucket.rounds
            elif result.catching_up:
                bucket.due = min(bucket.due + 1, plan.probe.last)
        self._measure(number, result)
        for row, times in Counter(result.offers).items():
            if row.accepted is not None:
                self.survival.add(row.request_class, row.offered, row.accepted, times)

    def new_draft(self) -> None:
        self.survival.doubt(0.05)
        for bucket in self._buckets.values():
            bucket.rests.clear()

    def _credit_s(self, first_s: float) -> float:
        """Seconds that probes may still cost."""
        return PROBE_SHARE * self._spent_s + first_s - self._probes_s

    def _kept(self, row: RowResult) -> float:
        """Accepted drafts of a row; as many as are expected where they may not be counted."""
        if row.accepted is None:
            return sum(self.survival.chances(row.request_class, row.offered))
        return row.accepted

    def _measure(self, number: int, result: RoundResult) -> None:
        if not result.catching_up:
            self.latency.add(number, result.k, result.seconds)
        usual_s = self.latency.seconds(number, result.k)
        late_s = max(0.0, result.seconds - usual_s) if result.catching_up else 0.0
        if result.k > 0:
            self._late_s = 0.995 * self._late_s + late_s
            self._drafting_s = 0.995 * self._drafting_s + result.seconds - late_s
        if not result.catching_up and result.num_drafted is not None:
            bucket = self._buckets.setdefault(number, _Bucket(self.start))
            # A stall of the machine is not the price of a draft.
            bucket.cost.add(result.num_drafted, min(result.seconds, 2.0 * usual_s))

    def _decide(self, bucket: _Bucket, load: _Load) -> None:
        bucket.probe, bucket.k = None, min(bucket.k, load.deepest)
        if not self.latency.measured(load.number, bucket.k):
            # Rounds with a new prompt may never be measured, since the draft reads it too: they use
            # the k of a measured load.
            bucket.k = min(self._known_k(load.number, bucket.k), load.deepest)
            return
        bucket.due = bucket.rounds + DECIDE_EVERY
        rates = self._rates(bucket, load)
        measured = [k for k in range(len(rates)) if self.latency.measured(load.number, k)]
        best = max(measured, key=rates.__getitem__)
        if rates[best] > (1.0 + GAIN_WANTED) * rates[bucket.k]:
            bucket.rests.pop(bucket.k, None)
            bucket.k = best
        bucket.least_survival = min(MOST_SURVIVAL, rates[bucket.k] * bucket.cost.seconds)
        bucket.caps = self._caps(bucket, load)
        self._probe(bucket, load, rates)

    def _known_k(self, number: int, otherwise: int) -> int:
        """The k of the bucket most like it whose k is measured."""
        near = nearest(
            number,
            [at for at, bucket in self._buckets.items() if self.latency.measured(at, bucket.k)],
        )
        return otherwise if near is None else self._buckets[near].k

    def _rates(self, bucket: _Bucket, load: _Load) -> list[float]:
        """Expected tokens per second at each depth from 0 on."""
        tokens = [float(load.rows.total())] * (load.deepest + 1)
        for budget, count in load.rows.items():
            chances = self.survival.chances(budget.request_class, load.deepest)
            kept = list(accumulate(chances, initial=0.0))
            for k in range(1, load.deepest + 1):
                tokens[k] += count * kept[bucket.k_of(budget, k)]
        return [count / self._seconds(load, k) for k, count in enumerate(tokens)]

    def _seconds(self, load: _Load, k: int) -> float:
        """Expected seconds of a round at depth k, less those of prompts, beside which a draft would
        look cheap."""
        seconds = self.latency.seconds(load.number, k)
        if k > 0 and self._drafting_s > 0:
            seconds *= 1.0 + self._late_s / self._drafting_s
        # Measurements of two k may contradict each other by more than a round without prompts
        # takes.
        return max(seconds - self._prompts_s(load), 0.1 * seconds)

    def _prompts_s(self, load: _Load) -> float:
        alone = bucket_of(load.rows.total())
        if alone == load.number:
            return 0.0
        without_s = self.latency.seconds(load.number, 0)
        return without_s - min(without_s, self.latency.seconds(alone, 0))

    def _caps(self, bucket: _Bucket, load: _Load) -> dict[str, int]:
        """Depths to which a class's drafts bring more than their time is worth; none for the
        class that goes deepest, whose depth is the measured k."""
        names = {budget.request_class for budget in load.rows}
        if len(names) == 1:
            return {}
        depths = {}
        for name in names:
            chances = self.survival.chances(name, load.deepest)
            depths[name] = sum(chance >= bucket.least_survival for chance in chances)
        deepest = max(depths.values())
        return {name: depth for name, depth in depths.items() if depth < deepest}

    def _probe(self, bucket: _Bucket, load: _Load, rates: list[float]) -> None:
        """Probe k = 0, the neighbours and the best drafting k in turns, as far as the account
        allows."""
        now = bucket.k
        best = max(range(1, len(rates)), key=rates.__getitem__)
        others = {0, now - 1, now + 1, best} - {now}
        first_s = FIRST_PROBES * self._seconds(load, now)
        for k in sorted(others, key=lambda k: (bucket.rests.get(k, _NONE).until, k != best)):
            rest = bucket.rests.get(k, _NONE)
            if not 0 <= k < len(rates) or bucket.rounds < rest.until:
                continue
            loss_s = PROBE_ROUNDS * self._seconds(load, k) * max(0.0, 1.0 - rates[k] / rates[now])
            affordable = loss_s <= self._credit_s(first_s)
            # The time of rounds without drafts is the measure of all others: it is measured even
            # without credit.
            if affordable or (k == 0 and not self.latency.measured(load.number, 0)):
                if now == 0:
                    # Only probes draft now, so what earlier ones saw is old.
                    self.survival.doubt(0.5)
                last = bucket.rounds + 2 * PROBE_ROUNDS
                bucket.probe = _Probe(k, rates[now], self._prompts_s(load), first_s, last)
                # The first round of a kind is not measured.
                is_new = not self.latency.measured(load.number, k)
                bucket.due = bucket.rounds + PROBE_ROUNDS + is_new
                longer = min(2 * rest.rounds, LONGEST_REST)
                bucket.rests[k] = _Rest(bucket.rounds + rest.rounds, longer)
                return
