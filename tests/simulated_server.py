"""A made-up server for `--k auto`, in simulated time: its rounds have a known price and its drafts a
known chance of being kept."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache
from math import inf

from draftsmith.serve.control.control import (
    MAX_AUTO_K,
    Control,
    FixedControl,
    RoundPlan,
    RoundResult,
    RowBudget,
    RowResult,
    rest_plan,
)

STALLS, STALL = 0.005, 4.0  # share of rounds that stall, and the factor on their time


@dataclass(frozen=True)
class Costs:
    """Milliseconds of a round: a pass takes the time of the weights or of its tokens."""

    fixed: float
    weights: float
    token: float
    draft: float  # of drafting, however deep
    step: float  # of one more depth
    row_step: float  # of one more drafted token
    read: float  # of a token that the draft reads late

    def round(self, num_tokens: int, ks: Sequence[int], unread: int) -> float:
        verify = self.fixed + max(self.weights, self.token * (num_tokens + sum(ks)))
        deepest = max(ks, default=0)
        if deepest == 0:
            return verify
        return (
            verify + self.draft + self.step * deepest + self.row_step * sum(ks) + self.read * unread
        )


# A target of a few million parameters and an EAGLE-3 draft on two cores, and one of 100 million.
SMALL = Costs(1.6, 0.6, 0.14, 0.3, 0.65, 0.09, 0.04)
PADDED = Costs(2.0, 14.0, 1.0, 0.4, 1.5, 0.15, 0.06)


@dataclass
class Request:
    request_class: str
    left: int
    unread: int


@dataclass(frozen=True)
class Scenario:
    """Streams that each send a request after the other.

    Args:
        ms: length of a run. What changes, changes at a time, so that every control has it as long.
        streams: number of them, by time.
        alpha: chance that a drafted token is kept, by class, position and time.
    """

    costs: Costs
    ms: float
    streams: Callable[[float], int]
    alpha: Callable[[str, int, float], float]
    classes: tuple[str, ...] = ("",)
    prompt: int = 24
    answer: tuple[int, int] = (40, 200)


OnRound = Callable[[float, RoundPlan], None]


def run(scenario: Scenario, control: Control, seed: int, on_round: OnRound | None = None) -> float:
    """Tokens per millisecond, the time of learning included; `on_round` gets the time of each round
    and its plan."""
    chance, times = random.Random(seed), random.Random(seed + 1000)
    running: list[Request] = []
    sent = 0
    total = spent = 0.0
    while spent < scenario.ms:
        arrivals: list[Request] = []
        while len(running) + len(arrivals) < scenario.streams(spent):
            name = scenario.classes[sent % len(scenario.classes)]
            arrivals.append(Request(name, chance.randint(*scenario.answer), scenario.prompt))
            sent += 1
        num_tokens = len(running) + sum(request.unread for request in arrivals)
        plan = _plan(control, running, num_tokens)
        if on_round is not None and plan is not None:
            on_round(spent, plan)
        ks = plan.ks if plan is not None else []
        tokens, offered, accepted = _draft(scenario, chance, running, plan, spent)
        unread = sum(request.unread for request, k in zip(running, ks, strict=True) if k > 0)
        ms = scenario.costs.round(num_tokens, offered, unread)
        noise = 1.0 + 0.05 * abs(times.gauss(0, 1))
        if times.random() < STALLS:
            noise *= STALL
        result = RoundResult(
            plan,
            num_tokens,
            len(running) + len(arrivals),
            max(ks, default=0),
            ms * noise / 1e3,
            unread > 2 * (num_tokens + sum(ks)),
            [
                RowResult(request.request_class, k, kept)
                for request, k, kept in zip(running, ks, accepted, strict=True)
                if k > 0
            ],
            sum(offered),
            unread,
        )
        if plan is None or not plan.at_rest:
            control.observe(result)
        for request, k, kept in zip(running, ks, accepted, strict=True):
            request.unread = 0 if k > 0 else request.unread + 1
            request.left -= 1 + kept
        for request in arrivals:
            request.left -= 1
        running = [request for request in (*running, *arrivals) if request.left > 0]
        total += tokens + len(arrivals)
        spent += ms
    return total / spent


def _plan(control: Control, running: Sequence[Request], num_tokens: int) -> RoundPlan | None:
    """Plan of the rows that are decoding, as the scheduler gets it; None without any."""
    if not running:
        return None
    classes = {request.request_class for request in running}
    if control.rests(classes, len(running), num_tokens):
        return rest_plan(len(running))
    budgets = [
        RowBudget(request.request_class, min(MAX_AUTO_K, request.left - 1)) for request in running
    ]
    return control.choose(budgets, num_tokens)


@cache
def expected(alphas: tuple[float, ...]) -> float:
    """Expected accepted tokens of a draft."""
    survived, total = 1.0, 0.0
    for alpha in alphas:
        survived *= alpha
        total += survived
    return total


def _draft(
    scenario: Scenario,
    chance: random.Random,
    running: Sequence[Request],
    plan: RoundPlan | None,
    now: float,
) -> tuple[float, list[int], list[int]]:
    """Expected tokens of the round; offered and accepted tokens by row."""
    tokens, offered, accepted = 0.0, [], []
    for request, k in zip(running, [] if plan is None else plan.ks, strict=True):
        alphas = tuple(scenario.alpha(request.request_class, i, now) for i in range(k))
        kept = next((i for i, alpha in enumerate(alphas) if chance.random() > alpha), len(alphas))
        tokens += 1.0 + expected(alphas)
        offered.append(len(alphas))
        accepted.append(kept)
    return tokens, offered, accepted


class Constant(FixedControl):
    def __init__(self, k: int):
        self.k = k

    def choose(self, budgets: Sequence[RowBudget], num_tokens: int) -> RoundPlan:
        return RoundPlan([min(self.k, budget.most) for budget in budgets])


def always(alpha: float) -> Callable[[str, int, float], float]:
    return lambda name, position, ms: alpha


def unlike(name: str, position: int, ms: float) -> float:
    return 0.85 if name == "easy" else 0.1


GETS_GOOD_MS = 12e3


def gets_good(name: str, position: int, ms: float) -> float:
    """A draft that is worth nothing for long, and much from then on."""
    return 0.1 if ms < GETS_GOOD_MS else 0.9


def scenarios() -> dict[str, Scenario]:
    one, eight = (lambda ms: 1), (lambda ms: 8)
    return {
        "small target, bad draft, 1": Scenario(SMALL, 6e3, one, always(0.15)),
        "small target, bad draft, 8": Scenario(SMALL, 6e3, eight, always(0.15)),
        "padded target, 1": Scenario(PADDED, 3e4, one, always(0.7)),
        "padded target, 8": Scenario(PADDED, 3e4, eight, always(0.7)),
        "two classes, padded, 8": Scenario(PADDED, 3e4, eight, unlike, ("easy", "hard")),
        "first second, small, 8": Scenario(SMALL, 1e3, eight, always(0.6), answer=(48, 48)),
        "gets good after long rest, small, 1": Scenario(SMALL, 3e4, one, gets_good),
    }


NOTICED = 40  # rounds of which most draft once it is noticed that drafting pays


def noticed_ms(scenario: Scenario, control: Control, seed: int) -> float:
    """Milliseconds from `GETS_GOOD_MS` to the first of `NOTICED` rounds most of which draft; inf
    where there are none."""
    drafts: list[tuple[float, bool]] = []
    run(scenario, control, seed, lambda ms, plan: drafts.append((ms, max(plan.ks) > 0)))
    after = [one for one in drafts if one[0] >= GETS_GOOD_MS]
    for begin in range(len(after) - NOTICED + 1):
        if 2 * sum(drafted for _, drafted in after[begin : begin + NOTICED]) > NOTICED:
            return after[begin][0] - GETS_GOOD_MS
    return inf
