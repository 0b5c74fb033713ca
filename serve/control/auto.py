"""k for the most tokens per second.

Measure how long rounds of each load take at each k, predict tokens per second from that and from
the survival of each class's drafts, choose the best k, and probe others where what is not known of
them may be worth more than the probe costs.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence, Set
from dataclasses import dataclass, field
from math import erf, exp, inf, log, pi, sqrt

from draftsmith.serve.control.control import (
    MAX_AUTO_K,
    RoundPlan,
    RoundResult,
    RowBudget,
)
from draftsmith.serve.control.forecast import Forecast, Forecaster, RoundLoad, share_of_price
from draftsmith.serve.control.latency import (
    PROBE_ROUNDS,
    TOGETHER,
    Bucket,
    LatencyTable,
    bucket_of,
)
from draftsmith.serve.control.survival import Survival

EARLY, LATE = 4, 32  # rounds of a bucket between two decisions: after a change, and long after
# Time without drafts between two decisions, long after a change; `LATE` rounds where these take
# longer.
REST_S = 0.2
# Least relative gain in tokens per second for a change of k.
GAIN_WANTED = 0.02
HORIZON = 75, 600  # rounds that a better k is thought to be of use for, at first and at most
MOST_SURVIVAL = 0.9  # bound of `least_survival`: k = 0 covers drafts that never pay
UNSEEN = 1.0 / 1000.0  # share of what is known of survival that a round without drafts takes away
UNREAD = 24  # rounds without drafts after which a draft has as much to read as ever


@dataclass(slots=True)
class _State:
    """Rounds of about as many known tokens."""

    k: int
    rounds: int = 0
    decided: int = 0  # round of the last decision
    due: int = 0  # round of the next decision
    pause: int = EARLY  # rounds between two decisions
    rest: int = 0  # last round of a rest, counted over all loads; 0: none
    rested: bool = False  # since k or classes changed: a probe that brings nothing ends in rest
    request_class: str = ""  # of the first row at the last decision
    classes: Set[str] = frozenset()  # of all rows at the last decision
    probe: int | None = None  # k in place of the chosen one, until `due`
    last: int = 0  # round after which the probe ends in any case
    tried: set[int] = field(default_factory=set)  # probes since the last rounds of the chosen k
    # a draft less likely to be kept brings fewer tokens than its time is worth
    least_survival: float = 0.0
    caps: dict[str, int] = field(default_factory=dict)  # k of classes whose drafts survive less

    def k_of(self, budget: RowBudget, k: int) -> int:
        return min(k, budget.most, self.caps.get(budget.request_class, k))


@dataclass(frozen=True, slots=True)
class _Plan(RoundPlan):
    """A round is measured in the bucket it was chosen for, whatever went through the target in the
    end: otherwise the k chosen here might never be measured, and never be left."""

    number: Bucket
    scale: float = 1.0


class AutoControl:
    """k = 0 is one of the choices. No k is tried without a chance that it pays, so that neither
    speculation that does not pay nor its probes cost much. `start` is the k before anything is
    known.
    """

    learns = True

    def __init__(self, start: int = 3, survival: Survival | None = None):
        self.start = start
        self.latency, self.survival = LatencyTable(), survival or Survival()
        self._buckets: dict[Bucket, _State] = {}
        self.forecaster = Forecaster(self.latency, self.survival)
        self._rounds = 0  # of all loads
        self._undrafted = 0  # rounds since one that drafted
        self._rested_rows = self._rested_tokens = 0  # of rounds at rest since one that was measured

    def rests(self, classes: Set[str], num_rows: int, num_tokens: int) -> bool:
        self._rounds += 1
        bucket = self._buckets.get(bucket_of(num_rows, num_tokens))
        if bucket is None or bucket.rest == 0:
            return False
        if bucket.rest < self._rounds or bucket.classes != classes:
            if bucket.rested:  # longer than until the decision that was due
                bucket.due = bucket.rounds + TOGETHER if bucket.classes == classes else 0
            bucket.rest = 0
            return False
        bucket.rounds += 1
        self._undrafted += 1
        self._rested_rows += num_rows
        self._rested_tokens += num_tokens
        return True

    def choose(self, budgets: Sequence[RowBudget], num_tokens: int) -> RoundPlan:
        deepest = min(max((budget.most for budget in budgets), default=0), MAX_AUTO_K)
        number = bucket_of(len(budgets), num_tokens)
        if deepest == 0:
            return _Plan([0] * len(budgets), number)
        bucket = self._state(number)
        bucket.rounds += 1
        if bucket.rounds >= bucket.due or budgets[0].request_class != bucket.request_class:
            bucket.request_class = budgets[0].request_class
            self._decide(bucket, RoundLoad(number, Counter(budgets), deepest))
        k = bucket.k if bucket.probe is None else bucket.probe
        if k == 0:
            return _Plan([0] * len(budgets), number, least_survival=bucket.least_survival)
        ks = [bucket.k_of(budget, k) for budget in budgets]
        scale = share_of_price(sum(ks), len(ks) * max(ks)) if len(ks) > 1 else 1.0
        return _Plan(ks, number, scale, least_survival=bucket.least_survival)

    def observe(self, result: RoundResult) -> None:
        plan = result.plan
        number = (
            plan.number
            if isinstance(plan, _Plan)
            else bucket_of(result.num_rows, result.num_tokens)
        )
        bucket = self._state(number)
        self._undrafted = 0 if result.k > 0 else self._undrafted + 1
        self.forecaster.note_prompts(result, self._rested_rows, self._rested_tokens)
        self._rested_rows = self._rested_tokens = 0
        self._measure(number, bucket, result)
        if not result.offers:
            return
        for row, times in Counter(result.offers).items():
            if row.accepted is not None:
                self.survival.add(row.request_class, row.offered, row.accepted, times)

    def new_draft(self) -> None:
        self.survival.doubt(0.05)
        for bucket in self._buckets.values():
            bucket.rest, bucket.due, bucket.rested = 0, 0, False

    def _state(self, number: Bucket) -> _State:
        found = self._buckets.get(number)
        if found is None:
            found = self._buckets[number] = _State(self.start)
        return found

    def _measure(self, number: Bucket, bucket: _State, result: RoundResult) -> None:
        if result.catching_up:
            self.forecaster.note_late_read(number, result)
            if self.latency.begun(number, result.k) and bucket.probe is not None:
                bucket.due = min(bucket.due + 1, bucket.last)
            return
        seconds = result.seconds
        scale = result.plan.scale if isinstance(result.plan, _Plan) else 1.0
        if scale < 1.0 and self.latency.measured(number, 0):
            plain_s = self.latency.seconds(number, 0)
            seconds = plain_s + max(0.0, seconds - plain_s) / scale
        self.latency.add(number, result.k, seconds)

    def _decide(self, bucket: _State, load: RoundLoad) -> None:
        since, bucket.decided = bucket.rounds - bucket.decided, bucket.rounds
        classes, before = {budget.request_class for budget in load.rows}, bucket.classes
        bucket.classes, bucket.rested = classes, bucket.rested and classes == before
        bucket.probe, bucket.k = None, min(bucket.k, load.deepest)
        bucket.pause = min(2 * bucket.pause, LATE)
        bucket.due = bucket.rounds + bucket.pause
        self.latency.settle()
        self.latency.forget(load.number, since)
        if bucket.k == 0:
            self.survival.doubt(max(0.0, 1.0 - UNSEEN * since))
        forecast = self.forecaster.forecast(load, bucket.k_of)
        rates = forecast.rates
        best = max(range(len(rates)), key=rates.__getitem__)
        if self.latency.compared(load.number) and (
            rates[best] > (1.0 + GAIN_WANTED) * rates[bucket.k]
        ):
            bucket.k, bucket.pause, bucket.rested = best, EARLY, False
            bucket.due = bucket.rounds + EARLY
        if not self.latency.measured(load.number, bucket.k):
            bucket.due = bucket.rounds + 2
            return
        token_s = forecast.depth_s(bucket.k) / load.rows.total()
        bucket.least_survival = min(MOST_SURVIVAL, rates[bucket.k] * token_s)
        bucket.caps = self._caps(bucket, load)
        others = {0, bucket.k - 1, min(bucket.k + 1, load.deepest), best} - bucket.tried
        worth = {k: self._worth(bucket, load, forecast, k) for k in others if k >= 0}
        k = max(worth, key=worth.__getitem__, default=bucket.k)
        if k == bucket.k or worth[k] <= 0.0:
            bucket.tried.clear()
            if bucket.k == 0 and (bucket.pause == LATE or bucket.rested) and classes == before:
                self._rest(bucket, load)
        else:
            bucket.tried.add(k)
            bucket.probe, bucket.pause = k, EARLY
            # The first round of a kind is not measured.
            bucket.due = bucket.rounds + PROBE_ROUNDS + (not self.latency.measured(load.number, k))
            bucket.last = bucket.due + PROBE_ROUNDS  # as many again where text is read late

    def _rest(self, bucket: _State, load: RoundLoad) -> None:
        """Draft nothing until the next decision, and measure the last rounds before it."""
        rounds = int(REST_S / self.latency.seconds(load.number, 0))
        if rounds > LATE:
            bucket.rested = True
        elif bucket.pause == LATE:
            rounds = LATE
        else:
            return
        bucket.rest = self._rounds + rounds - TOGETHER

    def _worth(self, bucket: _State, load: RoundLoad, forecast: Forecast, k: int) -> float:
        """Rounds that a probe of k may save, less those that it costs."""
        now = bucket.k
        if k == now:
            return 0.0
        is_alone = load.number == load.number.alone
        if k == 0 and is_alone and not self.latency.measured(load.number, 0):
            return inf  # the measure of all others
        rates = forecast.rates
        low, high = min(k, now), max(k, now)
        unknown = max(0.0, self.latency.variance(load.number, k, now))
        unknown += (sum(forecast.doubts[low:high]) / forecast.tokens[high]) ** 2
        # of which a probe resolves a part
        resolved = unknown / sqrt(unknown + self.latency.noise**2 / PROBE_ROUNDS)
        seconds = forecast.seconds[k] / forecast.seconds[now]
        cost = PROBE_ROUNDS * seconds * max(0.0, 1.0 - rates[k] / rates[now])
        if now == 0:
            cost += forecast.late_s / forecast.seconds[now] * min(1.0, self._undrafted / UNREAD)
        rounds = min(HORIZON[0] + bucket.rounds, HORIZON[1])
        return rounds * _gain(log(rates[k] / rates[now]) - GAIN_WANTED, resolved) - cost

    def _caps(self, bucket: _State, load: RoundLoad) -> dict[str, int]:
        """Depths to which a class's drafts bring more than their time is worth; none for the
        class that goes deepest, whose depth is the measured k."""
        if len(bucket.classes) == 1:
            return {}
        depths = {}
        for name in bucket.classes:
            chances = self.survival.chances(name, load.deepest)
            depths[name] = sum(chance >= bucket.least_survival for chance in chances)
        deepest = max(depths.values())
        return {name: depth for name, depth in depths.items() if depth < deepest}


def _gain(mean: float, spread: float) -> float:
    """Expectation of what is positive of a Gaussian."""
    if spread == 0.0:
        return max(0.0, mean)
    at = mean / spread
    return spread * exp(-0.5 * at * at) / sqrt(2.0 * pi) + mean * 0.5 * (1.0 + erf(at / sqrt(2.0)))
