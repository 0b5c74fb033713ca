"""`--k auto` against every fixed k on a made-up server, whose rounds have a known price and whose
drafts a known chance of being kept."""

from __future__ import annotations

import argparse
import json
import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cache
from math import inf
from pathlib import Path
from statistics import fmean

from draftsmith.serve.control.auto import AutoControl
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
SHARE = 4.0  # milliseconds that others keep the core


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


# The quickstart's target and EAGLE-3 on two cores, the same padded to 100M parameters, both again
# with kernels for products of few rows, and a GPU, where tokens are free until there are a hundred
# in a pass.
SMALL = Costs(1.6, 0.6, 0.14, 0.3, 0.65, 0.09, 0.04)
PADDED = Costs(2.0, 14.0, 1.0, 0.4, 1.5, 0.15, 0.06)
SMALL_FAST = Costs(1.0, 0.5, 0.15, 1.3, 0.4, 0.07, 0.05)
PADDED_FAST = Costs(1.0, 7.4, 1.4, 0.2, 0.45, 0.1, 0.05)
GPU = Costs(0.5, 10.0, 0.1, 0.5, 0.8, 0.004, 0.01)


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
        guesses: a drafter that ends its drafts by `least_survival`: each row's chance is drawn
            from these two in place of `alpha`.
        pace: factor on the time of a round, by time.
        shared: chance, for each millisecond of work, that others take the core for some.
    """

    costs: Costs
    ms: float
    streams: Callable[[float], int]
    alpha: Callable[[str, int, float], float]
    classes: tuple[str, ...] = ("",)
    prompt: int = 24
    answer: tuple[int, int] = (40, 200)
    guesses: tuple[float, float] | None = None
    pace: Callable[[float], float] = lambda ms: 1.0
    shared: float = 0.0


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
        ms = scenario.pace(spent) * scenario.costs.round(num_tokens, offered, unread)
        noise = 1.0 + 0.05 * abs(times.gauss(0, 1))
        if times.random() < STALLS:
            noise *= STALL
        noise += SHARE * (times.random() < scenario.shared * ms) / ms
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
        if scenario.guesses is None:
            alphas = tuple(scenario.alpha(request.request_class, i, now) for i in range(k))
        else:
            alpha = scenario.guesses[chance.random() < 0.5]
            least = 0.0 if plan is None else plan.least_survival
            alphas = tuple(alpha for i in range(k) if alpha ** (i + 1) >= least)
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


def of(rows: int) -> Callable[[float], int]:
    return lambda ms: rows


def turns(every_ms: float, *values: int) -> Callable[[float], int]:
    return lambda ms: values[int(ms / every_ms) % len(values)]


@cache
def _walk(seed: int) -> list[float]:
    """The machine's pace every 100 ms: a walk that stays within about 20 % of 1."""
    chance, at, found = random.Random(seed), 0.0, []
    for _ in range(1000):
        at = 0.98 * at + 0.02 * chance.gauss(0, 1)
        found.append(1.0 + at)
    return found


def walks(seed: int) -> Callable[[float], float]:
    return lambda ms: _walk(seed)[int(ms / 100.0) % 1000]


def wanders(ms: float) -> int:
    """1 to 24 streams and back."""
    return 1 + abs(int(ms / 100.0) % 46 - 23)


def unlike(name: str, position: int, ms: float) -> float:
    return 0.85 if name == "easy" else 0.1


def shipped(name: str, position: int, ms: float) -> float:
    """The draft that ships with the quickstart."""
    return (0.48, 0.57, 0.63)[min(position, 2)]


def fades(name: str, position: int, ms: float) -> float:
    return 0.8 - 0.08 * position


GETS_GOOD_MS = 12e3


def gets_good(name: str, position: int, ms: float) -> float:
    """A draft that is worth nothing for long, and much from then on."""
    return 0.1 if ms < GETS_GOOD_MS else 0.9


def turns_bad(name: str, position: int, ms: float) -> float:
    return 0.1 if int(ms / 15e3) % 2 else 0.8


def scenarios() -> dict[str, Scenario]:
    found: dict[str, Scenario] = {}
    for rows in (1, 8, 32):
        at = of(rows)
        found[f"small target, {rows}"] = Scenario(SMALL, 6e3, at, always(0.6))
        found[f"small target, bad draft, {rows}"] = Scenario(SMALL, 6e3, at, always(0.15))
        found[f"padded target, {rows}"] = Scenario(PADDED, 3e4, at, always(0.7))
        found[f"GPU, {rows}"] = Scenario(GPU, 2e4, at, fades, prompt=400)
        found[f"GPU, bad draft, {rows}"] = Scenario(GPU, 2e4, at, always(0.1), prompt=400)
    prompts = Scenario(GPU, 2e4, of(64), always(0.5), prompt=600, answer=(20, 60))
    found["GPU, a prompt in most rounds, 64"] = prompts
    two = ("easy", "hard")
    found["two classes, small, 8"] = Scenario(SMALL, 6e3, of(8), unlike, two)
    found["two classes, padded, 1"] = Scenario(PADDED, 3e4, of(1), unlike, two)
    found["two classes, padded, 8"] = Scenario(PADDED, 3e4, of(8), unlike, two)
    found["two classes, GPU, 8"] = Scenario(GPU, 1e4, of(8), unlike, two)
    found["two classes, GPU, 48"] = Scenario(GPU, 1e4, of(48), unlike, two)
    shifts = turns(3e3, 1, 8, 32)
    found["load shifts, small"] = Scenario(SMALL, 18e3, shifts, always(0.6))
    found["load shifts, padded"] = Scenario(PADDED, 36e3, shifts, always(0.7))
    found["load wanders, small"] = Scenario(SMALL, 14e3, wanders, always(0.6))
    found["load wanders, GPU"] = Scenario(GPU, 28e3, wanders, always(0.6), prompt=100)
    found["acceptance shifts, padded, 4"] = Scenario(PADDED, 6e4, of(4), turns_bad)
    found["acceptance shifts, GPU, 4"] = Scenario(GPU, 6e4, of(4), turns_bad)
    for name, costs, rows, ms in (
        ("padded", PADDED, 4, 3e4),
        ("small", SMALL, 4, 6e3),
        ("GPU", GPU, 64, 1e4),
    ):
        found[f"ends by confidence, {name}, {rows}"] = Scenario(
            costs, ms, of(rows), always(0.6), guesses=(0.95, 0.25)
        )
    found["pace changes, small, 1"] = Scenario(
        SMALL, 6e3, of(1), always(0.6), pace=turns(500, 1, 2)
    )
    found["pace changes, padded, 8"] = Scenario(
        PADDED, 3e4, of(8), always(0.7), pace=turns(3e3, 1, 2)
    )
    found["first second, small, 8"] = Scenario(SMALL, 1e3, of(8), always(0.6), answer=(48, 48))
    found["first 4 seconds, padded, 8"] = Scenario(PADDED, 4e3, of(8), always(0.7), answer=(48, 48))
    late = Scenario(PADDED, 3e4, of(4), always(0.6), prompt=400, answer=(20, 40))
    found["read late for short answers, padded, 4"] = late
    for rows in (1, 2):
        found[f"gets good after long rest, small, {rows}"] = Scenario(
            SMALL, 3e4, of(rows), gets_good
        )
    return found | benchmarks()


def benchmarks() -> dict[str, Scenario]:
    """One and three passes of `scripts/bench_serving`, the server's start included."""
    found = {}
    for target, costs in (("small", SMALL_FAST), ("padded", PADDED_FAST)):
        for draft, alpha in (("shipped", shipped), ("good", always(0.68))):
            for rows in (1, 8, 32):
                rounds = 48 * (4 if rows > 1 else 6)
                pass_ms = rounds * costs.round(rows, [], 0)
                one = Scenario(costs, pass_ms, of(rows), alpha, prompt=48, answer=(48, 48))
                for passes in (1, 3):
                    found[f"bench, {target}, {draft} draft, {rows}, {passes}"] = replace(
                        one, ms=passes * pass_ms, pace=walks(rows + passes)
                    )
                found[f"bench, {target}, {draft} draft, {rows}, 3, shared core"] = replace(
                    one, ms=3 * pass_ms, shared=0.1
                )
    return found


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


def measure(scenario: Scenario, seeds: int) -> dict[str, float]:
    fixed = [run(scenario, Constant(k), 0) for k in range(MAX_AUTO_K + 1)]
    rests: list[bool] = []
    rates = [
        run(scenario, AutoControl(), seed, lambda ms, plan: rests.append(plan.at_rest))
        for seed in range(seeds)
    ]
    late = {}
    if scenario.alpha is gets_good:
        late["noticed_ms"] = max(noticed_ms(scenario, AutoControl(), seed) for seed in range(seeds))
    return late | {
        "at_rest": fmean(rests),
        "best_k": fixed.index(max(fixed)),
        "over_best": fmean(rates) / max(fixed),
        "worst_over_best": min(rates) / max(fixed),
        "over_none": fmean(rates) / fixed[0],
        "worst_over_none": min(rates) / fixed[0],
        "gain": max(fixed) / fixed[0],
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--only", default="")
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    rows = {}
    for name, scenario in scenarios().items():
        if args.only in name:
            rows[name] = measure(scenario, args.seeds)
            row = rows[name]
            print(
                f"{name:52} k={row['best_k']} gain {row['gain']:.2f}  / best "
                f"{row['over_best']:.3f}  / none {row['over_none']:.3f} "
                f"(worst {row['worst_over_none']:.3f})  at rest {row['at_rest']:.2f}"
                + (f"  noticed after {row['noticed_ms']:.0f} ms" if "noticed_ms" in row else ""),
                flush=True,
            )
    for name in ("over_best", "over_none"):
        values = [row[name] for row in rows.values()]
        print(f"{name}: mean {fmean(values):.3f}, lowest {min(values):.3f}")
    if args.out:
        args.out.write_text(json.dumps(rows, indent=1) + "\n")


if __name__ == "__main__":
    main()
