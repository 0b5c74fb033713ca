"""k for the most tokens per second, by prices and survival measured while serving.

The best of the k that were measured is used. Others are tried for a few rounds, at intervals that
double while nothing changes, and only where a better price or survival than is known could win.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Sequence, Set
from dataclasses import dataclass, field, replace
from itertools import accumulate
from math import log2

from draftsmith.serve.control.control import (
    MAX_AUTO_K,
    Control,
    RoundPlan,
    RoundResult,
    RowBudget,
    RowResult,
)
from draftsmith.serve.control.estimates import TOGETHER, DraftLengths, RoundTimes, Survival

PROBE_ROUNDS = 3
EARLY, LATE = 8, 32  # rounds between two decisions, at first and at most while drafting
LONGEST = 256  # most rounds between two probes
GAIN_WANTED = 0.02  # least relative gain in tokens per second for a change of k
HOPE = 1.0  # deviations of survival above what is known that a probe may find
UNSURE = 0.2  # relative price below that of a k never measured that it may find
OLD = 4000  # rounds after which a price may have halved
FREE, SHARE = 5.0, 0.01  # rounds that probes may cost, and share of all rounds of the load
UNSEEN = 1.0 / 1000.0  # share of what is known of survival that a round without drafts takes away
NEW_TEXT = 0.5  # share of what is known of survival that is left where a text begins at rest
MOST_SURVIVAL = 0.9  # bound of `least_survival`: k = 0 covers drafts that never pay
ALIKE = 0.8  # of the best class's first chance: a probe drafts for classes above it
MEMORY = 1000.0  # tokens that the share of prompts goes over


@dataclass(slots=True)
class _Load:
    """Rounds of about as many rows and known tokens."""

    rows: int
    tokens: int
    k: int
    times: RoundTimes = field(default_factory=RoundTimes)
    rounds: int = 0
    due: int = 0  # round of the next decision
    rest: int = 0  # last round of a rest, counted over all loads; 0: none
    request_class: str = ""  # of the first row at the last decision
    classes: Set[str] = frozenset()  # of all rows at the last decision
    rate: float = 0.0  # expected tokens per second
    # a draft less likely to be kept brings fewer tokens than its time is worth
    least_survival: float = 0.0
    caps: dict[str, int] = field(default_factory=dict)  # k of classes whose drafts survive less
    probe: int | None = None  # k in place of the chosen one, until `due`
    probe_due: int = 0  # round from which others are tried
    pause: int = EARLY  # rounds from all probes to the first one again
    since: int = 0  # round of that first one
    probed: dict[int, int] = field(default_factory=dict)  # round of the last probe by k
    cost: float = 0.0  # of all probes, in rounds

    def k_of(self, budget: RowBudget, k: int) -> int:
        return min(k, budget.most, self.caps.get(budget.request_class, k))

    def doublings(self, other: _Load) -> float:
        """Distance from another."""
        return abs(log2(self.rows / other.rows)) + 0.5 * abs(log2(self.tokens / other.tokens))

    def look_again(self) -> None:
        self.pause, self.probe_due, self.since = EARLY, self.rounds, self.rounds + 1


@dataclass(frozen=True, slots=True)
class _Plan(RoundPlan):
    load: _Load
    is_measured: bool  # False: a prompt beside the rows says nothing about the price of drafts


class AutoControl(Control):
    """k = 0 is one of the choices. `start` is the k before anything is known."""

    learns = True

    def __init__(self, start: int = 3, survival: Survival | None = None):
        self.start, self.survival, self.lengths = start, survival or Survival(), DraftLengths()
        self._loads: dict[tuple[int, int], _Load] = {}
        self._rounds = 0  # of all loads
        self._decided = self._fed = 0.0  # fading sums: tokens decided, prompt tokens fed
        # rounds in which a draft read text first, with the tokens that a row drafted
        self._late: deque[tuple[_Load, float, RoundResult]] = deque(maxlen=8)

    def rests(self, classes: Set[str], num_rows: int, num_tokens: int) -> bool:
        self._rounds += 1
        load, _ = self._load(num_rows, num_tokens)
        if load.rest == 0:
            return False
        if load.rest < self._rounds or load.classes != classes:
            load.due = load.rounds + TOGETHER if load.classes == classes else 0
            load.rest = 0
            return False
        load.rounds += 1
        self._note_prompts(num_rows, num_tokens - num_rows)
        return True

    def choose(self, budgets: Sequence[RowBudget], num_tokens: int) -> RoundPlan:
        deepest = min(max((budget.most for budget in budgets), default=0), MAX_AUTO_K)
        load, is_measured = self._load(len(budgets), num_tokens)
        if deepest > 0:
            load.rounds += 1
            if load.rounds >= load.due or budgets[0].request_class != load.request_class:
                load.request_class = budgets[0].request_class
                self._decide(load, Counter(budgets), deepest)
        k = load.k if load.probe is None else load.probe
        ks = [load.k_of(budget, k) for budget in budgets]
        return _Plan(ks, load, is_measured, least_survival=load.least_survival)

    def observe(self, result: RoundResult) -> None:
        tokens = result.num_rows + sum(map(self._kept, result.offers))
        self._note_prompts(tokens, result.num_tokens - result.num_rows)
        if isinstance(result.plan, _Plan):
            self._measure(result.plan, result, tokens)
        for row, times in Counter(result.offers).items():
            if row.accepted is not None:
                self.survival.add(row.request_class, row.offered, row.accepted, times)
            if row.drafted is not None:
                self.lengths.add(row.offered, row.drafted, times)

    def new_draft(self) -> None:
        self._look_again(list(self._loads.values()), 0.05)

    def new_text(self) -> None:
        if resting := [load for load in self._loads.values() if load.rest]:
            self._look_again(resting, NEW_TEXT)

    def _look_again(self, loads: Sequence[_Load], left: float) -> None:
        self.survival.doubt(left)
        for load in loads:
            load.rest = load.due = 0
            load.look_again()

    def _load(self, num_rows: int, num_tokens: int) -> tuple[_Load, bool]:
        """Load that a round goes by, and whether it is of that load itself. Beside a prompt, drafts
        cost what they cost without; where there always is one, such rounds are measured."""
        rows = _top(max(1, num_rows))
        load = self._loads.get((rows, rows))
        if num_tokens > num_rows:
            if load is not None and load.times.compared:
                return load, False
            key = rows, _top(num_tokens)
        else:
            key = rows, rows
        load = self._loads.get(key)
        if load is None:
            known = any(other.times.compared for other in self._loads.values())
            load = self._loads[key] = _Load(*key, k=0 if known else self.start)
        return load, True

    def _kept(self, row: RowResult) -> float:
        """Accepted drafts of a row; as many as are expected where they may not be counted."""
        if row.accepted is None:
            return sum(self.survival.chances(row.request_class, row.offered))
        return row.accepted

    def _note_prompts(self, decided: float, fed: int) -> None:
        """Count what a draft has to read for each token decided."""
        fade = max(0.0, 1.0 - decided / MEMORY)
        self._decided = fade * self._decided + decided
        self._fed = fade * self._fed + max(0, fed)

    def _measure(self, plan: _Plan, result: RoundResult, tokens: float) -> None:
        load, times, drafted = plan.load, plan.load.times, self._drafted(result)
        if plan.is_measured and load.probe is not None and load.rate > 0.0:
            usual_s = times.at(self.lengths.of(load.k))
            load.cost += (result.seconds - tokens / load.rate) / usual_s
        if result.catching_up:
            self._late.append((load, drafted, result))
            if load.probe is not None:
                load.due = min(load.due + 1, load.probed[load.probe] + 2 * PROBE_ROUNDS)
        elif plan.is_measured:
            times.add(drafted, result.seconds, usual=load.probe is None)

    def _drafted(self, result: RoundResult) -> float:
        """Tokens that a row drafted, on average, of the k that were planned."""
        counted = [row for row in result.offers if row.drafted is not None]
        planned = sum(row.offered for row in counted)
        if planned == 0:
            return self.lengths.of(result.k)
        return result.k * sum(row.drafted or 0 for row in counted) / planned

    def _is_measured(self, load: _Load, k: int) -> bool:
        return round(self.lengths.of(k)) in load.times.counts

    def _decide(self, load: _Load, rows: Counter[RowBudget], deepest: int) -> None:
        classes, before = {budget.request_class for budget in rows}, load.classes
        load.classes, load.probe, load.k = classes, None, min(load.k, deepest)
        load.times.settle()
        if not load.times.compared:
            known = [other for other in self._loads.values() if other.times.compared]
            if known:
                load.times.like(min(known, key=load.doublings).times)
        measured = [k for k in range(deepest + 1) if self._is_measured(load, k)]
        if not measured:
            load.due = load.rounds + PROBE_ROUNDS
            return
        rates = self._rates(load, rows, deepest)
        best = max(measured, key=rates.__getitem__)
        if load.k not in measured or rates[best] > (1.0 + GAIN_WANTED) * rates[load.k]:
            load.k = best
            load.look_again()
        elif load.k == 0 and classes != before:
            load.look_again()
        load.rate = rates[load.k]
        drafted = max(1, round(self.lengths.of(load.k)))
        low, high = max(1, drafted - 1), min(drafted + 1, MAX_AUTO_K)
        depth_s = (load.times.by_k[high] - load.times.by_k[low]) / (high - low)
        load.least_survival = min(MOST_SURVIVAL, load.rate * depth_s / rows.total())
        load.caps = self._caps(load, deepest)
        load.due = load.rounds + min(load.pause, LATE)
        if load.rounds >= load.probe_due:
            self._probe(load, rows, rates)

    def _probe(self, load: _Load, rows: Counter[RowBudget], rates: list[float]) -> None:
        """Try another k; where none is worth it, wait for twice as long as before."""
        probe = self._candidate(load, rows, rates)
        if probe is not None:
            load.probe, load.probed[probe] = probe, load.rounds
            load.due = load.rounds + PROBE_ROUNDS
            load.probe_due = load.due + EARLY
            return
        load.pause = min(2 * load.pause, LONGEST)
        load.probe_due = load.rounds + load.pause
        load.since = load.probe_due
        if load.k == 0:
            self.survival.doubt(1.0 - UNSEEN * load.pause)
            load.due = load.probe_due
            if load.pause >= LATE:
                load.rest = self._rounds + load.pause - TOGETHER

    def _candidate(self, load: _Load, rows: Counter[RowBudget], rates: list[float]) -> int | None:
        """The k that may win by most, of those nearby; None where none may."""
        counts = load.times.counts
        if 0 not in counts:
            return 0  # the measure of all others
        if load.cost > FREE + SHARE * load.rounds:
            return None
        nearby = {0, load.k - 1, load.k + 1}
        if load.k > 0 or self._is_measured(load, 1):
            nearby.add(max(range(len(rates)), key=rates.__getitem__))
        hoped = self._rates(load, rows, len(rates) - 1, HOPE)
        winning: dict[int, float] = {}
        for k in nearby.intersection(range(len(rates))) - {load.k}:
            last = load.probed.get(k, 0)
            known = counts.get(round(self.lengths.of(k)), 0)
            price = UNSURE / (1 + known) + (load.rounds - last) / OLD
            rate = hoped[k] * (1.0 + price)
            if (last == 0 or last < load.since) and rate > (1.0 + GAIN_WANTED) * rates[load.k]:
                winning[k] = rate
        return max(winning, key=winning.__getitem__, default=None)

    def _rates(
        self, load: _Load, rows: Counter[RowBudget], deepest: int, hope: float = 0.0
    ) -> list[float]:
        """Expected tokens per second by k."""
        tokens = [float(rows.total())] * (deepest + 1)
        for budget, count in rows.items():
            chances = self.survival.chances(budget.request_class, deepest, hope)
            kept = list(accumulate(chances, initial=0.0))
            for k in range(1, deepest + 1):
                tokens[k] += count * kept[load.k_of(budget, k)]
        # A draft reads as many prompts as are fed for these tokens.
        read_s = self._reading_s() * self._fed / max(1.0, self._decided)
        return [
            count / (load.times.at(self.lengths.of(k)) + (k > 0) * read_s * count)
            for k, count in enumerate(tokens)
        ]

    def _reading_s(self) -> float:
        """Seconds that a draft takes to read a token of text late."""
        known = [late for late in self._late if round(late[1]) in late[0].times.counts]
        extra_s = sum(max(0.0, late.seconds - load.times.at(depth)) for load, depth, late in known)
        return extra_s / max(1, sum(late.num_catch_up for *_, late in known))

    def _caps(self, load: _Load, deepest: int) -> dict[str, int]:
        """Depths to which a class's drafts bring more than their time is worth; none for the
        class that goes deepest, whose depth is the measured k."""
        if len(load.classes) == 1:
            return {}
        chances = {name: self.survival.chances(name, deepest) for name in load.classes}
        least = min(load.least_survival, ALIKE * max(first for first, *_ in chances.values()))
        depths = {name: sum(one >= least for one in each) for name, each in chances.items()}
        most = max(depths.values())
        return {name: depth for name, depth in depths.items() if depth < most}


def _top(count: int) -> int:
    """Next power of two."""
    return 1 << (count - 1).bit_length()


class _Heights(Survival):
    """A tree counts as one draft, which brings as many tokens as its kept path is deep."""

    def __init__(self, depth: int):
        super().__init__()
        self.depth = depth

    def add(self, request_class: str, offered: int, accepted: int, times: int = 1) -> None:
        super().add(request_class, min(offered, self.depth), accepted, times)

    def chances(self, request_class: str, k: int, hope: float = 0.0) -> list[float]:
        return [sum(super().chances(request_class, self.depth, hope))] if k > 0 else []


class TreeControl(AutoControl):
    """A round's rows grow their trees or none. Trees have one size, of which there is 0 or 1."""

    def __init__(self, depth: int):
        super().__init__(start=1, survival=_Heights(depth))

    def choose(self, budgets: Sequence[RowBudget], num_tokens: int) -> RoundPlan:
        single = [budget._replace(most=min(budget.most, 1)) for budget in budgets]
        chosen = super().choose(single, num_tokens)
        nodes = [budget.most * k for budget, k in zip(budgets, chosen.ks, strict=True)]
        return replace(chosen, ks=nodes, least_survival=0.0)

    def observe(self, result: RoundResult) -> None:
        offers = [row._replace(drafted=None) for row in result.offers]
        super().observe(result._replace(k=min(result.k, 1), offers=offers))
