"""The controller against a made-up machine: what a round costs and which drafts survive is known,
so the best k is too."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache, partial
from math import cos, pi
from statistics import fmean

import pytest

from draftsmith.serve.control.auto import AutoControl, TreeControl
from draftsmith.serve.control.control import Control, RoundPlan, RoundResult, RowBudget, RowResult
from draftsmith.serve.control.estimates import RoundTimes, Survival

MOST = 8


@dataclass
class Machine:
    """A pass costs the weights' time or its tokens' time, whichever is more; a draft step a share
    of the weights' time."""

    alpha: Callable[[str, int], float]  # of a class, at a round number
    weights_s: float = 1e-2
    token_s: float = 1e-4  # the batch is compute-bound from 100 tokens on
    draft_share: float = 0.08
    draft_fixed_s: float = 5e-4
    noise: float = 0.05

    def round_s(self, num_tokens: int, ks: list[int]) -> float:
        tokens = num_tokens + sum(ks)
        verify_s = max(self.weights_s, self.token_s * tokens)
        drafting = sum(k > 0 for k in ks)
        draft_s = (
            self.draft_fixed_s
            + max(ks) * self.draft_share * max(self.weights_s, self.token_s * drafting)
            if drafting
            else 0.0
        )
        return verify_s + draft_s


@cache
def accepted_on_average(alpha: float, k: int) -> float:
    return sum(alpha ** (depth + 1) for depth in range(k))


def play(
    control: Control,
    machine: Machine,
    classes: list[str],
    rounds: int,
    *,
    seed: int = 0,
    skip: int = 0,
) -> float:
    """Tokens a second after the first `skip` rounds; the accepted tokens of a round are drawn."""
    chance = random.Random(seed)
    tokens = seconds = 0.0
    for number in range(rounds):
        plan = control.choose([RowBudget(name, MOST) for name in classes], len(classes))
        ks = plan.ks
        round_s = machine.round_s(len(classes), ks)
        offers, expected = [], len(classes)
        for name, k in zip(classes, ks):
            alpha, accepted = machine.alpha(name, number), 0
            while accepted < k and chance.random() < alpha:
                accepted += 1
            expected += accepted_on_average(alpha, k)
            if k:
                offers.append(RowResult(name, k, accepted))
        noisy_s = (
            round_s
            * (1.0 + machine.noise * abs(chance.gauss(0, 1)))
            * (4.0 if chance.random() < 0.005 else 1.0)
        )
        control.observe(
            RoundResult(plan, len(classes), len(classes), max(ks), noisy_s, False, offers)
        )
        if number >= skip:
            # Expectations, so that luck with the drafts does not blur the comparison.
            tokens += expected
            seconds += round_s
    return tokens / seconds


def fixed_rate(
    machine: Machine, classes: list[str], k: int, rounds: int, *, skip: int = 0
) -> float:
    """As `play` with the same k in every round, where nothing has to be drawn."""
    counts, tokens, seconds = Counter(classes), 0.0, 0.0
    for number in range(rounds):
        round_s = machine.round_s(len(classes), [k] * len(classes))
        if number >= skip:
            seconds += round_s
            tokens += len(classes) + sum(
                count * accepted_on_average(machine.alpha(name, number), k)
                for name, count in counts.items()
            )
    return tokens / seconds


def best_fixed(machine: Machine, classes: list[str], rounds: int) -> tuple[float, int]:
    rates = [fixed_rate(machine, classes, k, rounds) for k in range(MOST + 1)]
    return max(rates), rates.index(max(rates))


@pytest.mark.parametrize("rows", [1, 8])
@pytest.mark.parametrize("token_share, alpha", [(0.5, 0.45), (0.5, 0.7), (0.2, 0.6)])
def test_a_drafter_that_often_has_nothing_is_judged_by_what_it_drafts(
    rows: int, token_share: float, alpha: float
) -> None:
    """Texts repeat ever more and then ever less; a row drafts a whole chain where its text repeats
    and nothing elsewhere. A drafted token a row takes `token_share` of a pass."""

    def rate(control: Control, seed: int) -> float:
        chance, tokens, seconds = random.Random(seed), 0.0, 0.0
        for number in range(4000):
            ks = (plan := control.choose([RowBudget("", MOST)] * rows, rows)).ks
            repeating = 0.5 - 0.5 * cos(2 * pi * number / 400)
            drafted = [k * (chance.random() < repeating) for k in ks]
            kept = [next((at for at in range(k) if chance.random() > alpha), k) for k in drafted]
            round_s = 0.01 * (1 + token_share * sum(drafted) / rows)
            offers = [RowResult("", *row) for row in zip(ks, kept, drafted) if max(ks)]
            noisy_s = round_s * (1.0 + 0.05 * abs(chance.gauss(0, 1)))
            control.observe(RoundResult(plan, rows, rows, max(ks), noisy_s, False, offers))
            tokens, seconds = tokens + rows + sum(kept), seconds + round_s
        return tokens / seconds

    def mean(control: Callable[[], Control]) -> float:
        return fmean(rate(control(), seed) for seed in range(3))

    best = max(mean(partial(Always, k)) for k in range(5))
    assert mean(AutoControl) > 0.975 * best


class Always(Control):
    def __init__(self, k: int):
        self.k = k

    def choose(self, budgets: Sequence[RowBudget], num_tokens: int) -> RoundPlan:
        return RoundPlan([self.k] * len(budgets))


BATCHES = [1, 4, 48, 256]


@pytest.mark.parametrize("alpha", [0.85, 0.6, 0.3])
@pytest.mark.parametrize("batch", BATCHES)
def test_the_best_fixed_k_of_each_load_is_nearly_reached_without_tuning(
    batch: int, alpha: float
) -> None:
    machine = Machine(lambda name, number: alpha)
    rounds, learning = (1500, 150) if batch < 100 else (500, 100)
    best, k = best_fixed(machine, ["a"] * batch, 20)
    found = play(AutoControl(), machine, ["a"] * batch, rounds, skip=learning)
    assert found >= 0.97 * best, (found / best, k)
    without = fixed_rate(machine, ["a"] * batch, 0, 20)
    assert found >= 0.99 * without


@pytest.mark.parametrize("batch", BATCHES)
def test_speculation_that_never_pays_costs_next_to_nothing(batch: int) -> None:
    machine = Machine(lambda name, number: 0.02, draft_share=0.3)
    control = AutoControl()
    rounds = 2000 if batch < 100 else 700
    # the trials go on, the first measurements are over
    found = play(control, machine, ["a"] * batch, rounds, skip=60)
    assert found >= 0.99 * fixed_rate(machine, ["a"] * batch, 0, 10)


@dataclass
class Moody(Machine):
    """Others use it now and then: every round, whatever its k, takes twice as long for a while."""

    period: int = 150
    rounds_done: int = -1  # `play` asks once a round

    def round_s(self, num_tokens: int, ks: list[int]) -> float:
        self.rounds_done += 1
        return super().round_s(num_tokens, ks) * (1.0 + self.rounds_done // self.period % 2)


@pytest.mark.parametrize(
    ("period", "draft_share", "alpha"),
    [(150, 0.6, 0.65), (150, 0.1, 0.8), pytest.param(600, 0.3, 0.3, marks=pytest.mark.long)],
)
def test_a_machine_that_slows_down_says_nothing_about_k(
    period: int, draft_share: float, alpha: float
) -> None:
    """Only the rounds of the chosen k are seen to become slower; what was measured of the others is
    made slower with them."""

    def machine() -> Moody:
        return Moody(lambda name, number: alpha, draft_share=draft_share, period=period)

    for batch in (1, 48):
        fixed = [fixed_rate(machine(), ["a"] * batch, k, 1200, skip=100) for k in range(MOST + 1)]
        found = [
            play(AutoControl(), machine(), ["a"] * batch, 1200, seed=seed, skip=100)
            for seed in range(3)
        ]
        assert sum(found) / 3 >= 0.97 * max(fixed)


def test_every_load_learns_what_it_takes_without_drafts_however_short_of_credit() -> None:
    """Requests that come and go pass through many loads; a draft that never pays must not stay
    where no trial was affordable."""
    machine = Machine(lambda name, number: 0.3, draft_share=0.4)
    control = AutoControl()
    for batch in (40, 24, 12, 8, 6, 3, 1):
        play(control, machine, [""] * batch, 30)
        assert max(control.choose([RowBudget("", MOST)] * batch, batch).ks) == 0, batch


def test_rounds_that_read_prompts_go_by_a_load_that_is_measured() -> None:
    """A draft that reads a new prompt, too, tells nothing about k; with the k that all begin with
    it would draft for ever."""
    machine = Machine(lambda name, number: 0.02, draft_share=0.4)
    control = AutoControl()
    plan = control.choose([RowBudget("a", MOST)] * 8, 64)
    assert max(plan.ks) > 0
    control.observe(RoundResult(plan, 64, 8, max(plan.ks), 0.1, True, []))
    play(control, machine, ["a"] * 8, 100)
    chosen = []
    for _ in range(120):
        plan = control.choose([RowBudget("a", MOST)] * 8, 64)
        chosen.append(max(plan.ks))
        control.observe(RoundResult(plan, 64, 8, chosen[-1], 0.1, chosen[-1] > 0, []))
    assert chosen.count(0) >= 60


def test_a_load_that_changes_is_followed() -> None:
    """The latencies of one load tell little about another's; the controller keeps both."""
    machine = Machine(lambda name, number: 0.7)
    control = AutoControl()
    for batch in (1, 200, 1, 200, 8, 200):
        best, _ = best_fixed(machine, ["a"] * batch, 10)
        found = play(control, machine, ["a"] * batch, 300)
        assert found >= 0.94 * best
    assert found >= 0.97 * best


def test_a_draft_that_turns_good_or_bad_is_noticed() -> None:
    machine = Machine(lambda name, number: 0.1 if 600 <= number < 4000 else 0.8, draft_share=0.3)
    control = AutoControl()
    chosen = []

    class Watched(Control):
        def choose(self, budgets: list[RowBudget], num_tokens: int) -> RoundPlan:
            plan = control.choose(budgets, num_tokens)
            chosen.append(plan.ks)
            return plan

        def observe(self, result: RoundResult) -> None:
            control.observe(result)

    play(Watched(), machine, ["a"] * 8, 8000)
    deepest = [max(ks) for ks in chosen]
    assert sum(deepest[500:600]) / 100 > 1.5
    assert sum(deepest[1500:4000]) / 2500 < 0.1
    assert sum(deepest[7000:]) / 1000 > 1.5


def test_classes_of_requests_get_drafts_by_their_own_survival() -> None:
    machine = Machine(lambda name, number: 0.9 if name == "easy" else 0.05, token_s=6e-4)
    classes = ["easy"] * 6 + ["hard"] * 6
    control = AutoControl()
    play(control, machine, classes, 1500)
    last: list[list[int]] = []
    for _ in range(20):
        plan = control.choose([RowBudget(name, MOST) for name in classes], len(classes))
        last.append(plan.ks)
        control.observe(
            RoundResult(
                plan, 12, 12, max(plan.ks), machine.round_s(12, plan.ks), False, [], sum(plan.ks)
            )
        )
    easy, hard = sum(sum(ks[:6]) for ks in last), sum(sum(ks[6:]) for ks in last)
    assert easy >= 6 * 20 and hard < 0.25 * easy
    best, _ = best_fixed(machine, classes, 10)
    assert play(control, machine, classes, 400) > best  # no single k does as well


def test_a_requests_own_k_is_a_cap_and_zero_means_zero() -> None:
    control = AutoControl(start=5)
    assert control.choose([RowBudget("", 2), RowBudget("", 8), RowBudget("", 0)], 3).ks == [2, 5, 0]
    assert control.choose([RowBudget("", 0)], 1).ks == [0]
    assert Control().choose([RowBudget("", 2), RowBudget("", 8)], 2).ks == [2, 8]


@pytest.mark.parametrize(("draft_ms", "pays"), [(3.9, False), (1.2, True)])
def test_a_prompt_in_a_round_makes_drafts_no_cheaper(draft_ms: float, pays: bool) -> None:
    """Beside 4 ms for a prompt a draft of 3.9 ms is a small part of the round, and still brings
    fewer tokens than that time would bring in the rounds after it."""
    control, chance = AutoControl(), random.Random(0)
    drafting = []
    for number in range(3000):
        num_tokens = 24 if number % 6 == 0 else 8
        plan = control.choose([RowBudget("", 1)] * 8, num_tokens)
        k = max(plan.ks)
        kept = [int(k > 0 and chance.random() < 0.63) for _ in range(8)]
        ms = 4.7 + 4.3 * (num_tokens == 24) + k * draft_ms
        offers = [RowResult("", k, one) for one in kept] if k else []
        control.observe(RoundResult(plan, num_tokens, 8, k, ms / 1e3, False, offers))
        if number >= 600 and num_tokens == 24:
            drafting.append(k)
    assert sum(drafting) / len(drafting) > 0.9 if pays else sum(drafting) / len(drafting) < 0.1


@pytest.mark.parametrize(("late_rounds", "answer"), [(10, 20), (30, 40), (30, 80)])
def test_prompts_that_the_draft_reads_late_are_part_of_the_price(
    late_rounds: int, answer: int
) -> None:
    """One stream: the first round that drafts of each request reads its prompt. Long answers pay
    for it, short ones never do."""
    ms = (4.0, 4.8, 5.4, 6.0)

    def rate(control: Control | None, fixed: int = 0) -> float:
        chance, tokens, taken_ms = random.Random(0), 0, 0.0
        for number in range(400):
            left, is_behind = answer, True
            if control is not None:
                control.observe(RoundResult(None, late_rounds, 1, 0, ms[0], False, []))
            while left > 0:
                plan = None if control is None else control.choose([RowBudget("", 3)], 1)
                k = fixed if plan is None else max(plan.ks)
                is_late, is_behind = k > 0 and is_behind, is_behind and k == 0
                took_ms = ms[k] + (4.0 * late_rounds if is_late else 0.0)
                kept = next((depth for depth in range(k) if chance.random() > 0.7), k)
                if control is not None:
                    offers = [RowResult("", k, kept)] if k else []
                    unread = late_rounds if is_late else 0
                    control.observe(
                        RoundResult(plan, 1, 1, k, took_ms / 1e3, is_late, offers, unread)
                    )
                left -= 1 + kept
                if number >= 100:
                    tokens, taken_ms = tokens + 1 + kept, taken_ms + took_ms
        return tokens / taken_ms

    best = max(rate(None, k) for k in range(4))
    assert rate(AutoControl()) >= 0.97 * best


def test_a_round_is_booked_where_it_was_chosen_whatever_ran() -> None:
    """A prompt that is expected and never fed: the k of that load must be measured, and left, all
    the same."""
    control = AutoControl()

    def drafting(expected: int, fed: int, rounds: int, *, accepted: bool) -> float:
        count = 0
        for _ in range(rounds):
            plan = control.choose([RowBudget("", MOST)] * 4, expected)
            k = max(plan.ks)
            offers = [RowResult("", k, k if accepted else 0)] * 4 if k else []
            control.observe(
                RoundResult(plan, fed, 4, k, 0.01 + 0.002 * k + 1e-5 * fed, False, offers)
            )
            count += k > 0
        return count / rounds

    drafting(4, 4, 300, accepted=True)
    assert drafting(300, 300, 300, accepted=True) > 0.9
    drafting(300, 4, 300, accepted=False)
    assert drafting(300, 4, 1000, accepted=False) < 0.1
    drafting(300, 4, 1500, accepted=True)
    assert drafting(300, 4, 500, accepted=True) > 0.9


def test_the_class_that_was_quiet_for_longest_is_forgotten() -> None:
    survival = Survival()
    for index in range(2000):
        survival.add(f"class {index}", 2, 2 if index in (0, 1999) else 0, 20)
    unknown = survival.chances("unknown", 2)
    assert survival.chances("class 0", 2) == unknown
    assert survival.chances("class 1999", 1)[0] > unknown[0] + 0.2


class Guessing:
    """A drafter whose drafts are either likely to be kept or not, and that knows which: every row
    ends where the plan says."""

    sure, unsure, fixed_s, token_s = 0.95, 0.25, 0.010, 0.0012

    def rounds(self, control: Control, count: int, *, heeds: bool) -> float:
        """Tokens a second over the second half; a drafter that does not heed the plan drafts on."""
        chance = random.Random(5)
        tokens = seconds = 0.0
        for number in range(count):
            plan = control.choose([RowBudget("", MOST)] * 4, 4)
            offers, drafted, expected = [], 0, 4.0
            for k in plan.ks:
                alpha = self.sure if chance.random() < 0.5 else self.unsure
                least = plan.least_survival if heeds else 0.0
                offered = sum(alpha ** (depth + 1) >= least for depth in range(k))
                accepted = 0
                while accepted < offered and chance.random() < alpha:
                    accepted += 1
                drafted += offered
                expected += sum(alpha ** (depth + 1) for depth in range(offered))
                offers.append(RowResult("", k, accepted))
            round_s = (self.fixed_s + self.token_s * drafted) * (
                1.0 + 0.05 * abs(chance.gauss(0, 1))
            )
            control.observe(
                RoundResult(
                    plan,
                    4,
                    4,
                    max(plan.ks),
                    round_s,
                    False,
                    offers if max(plan.ks) else [],
                    drafted,
                )
            )
            if 2 * number >= count:
                tokens, seconds = tokens + expected, seconds + round_s
        return tokens / seconds


def test_drafts_that_know_their_chances_end_where_they_cost_more_than_they_bring() -> None:
    """Against the same drafts whose guesses nobody asks for, with k as free."""
    deaf = Guessing().rounds(AutoControl(), 4000, heeds=False)
    heeding = Guessing().rounds(AutoControl(), 4000, heeds=True)
    assert heeding > 1.1 * deaf


@pytest.mark.parametrize(
    "tree_s, alpha, pays", [(4e-3, 0.8, True), (4e-3, 0.1, False), (4e-2, 0.8, False)]
)
def test_trees_are_grown_where_they_pay(tree_s: float, alpha: float, pays: bool) -> None:
    """A round takes 10 ms, with trees `tree_s` more; of 5 depths each is kept with chance alpha."""
    control, chance, grown = TreeControl(depth=5), random.Random(1), 0
    for number in range(600):
        # The last one is at its answer's end: its tree has room for 3 nodes.
        plan = control.choose([RowBudget("", 24), RowBudget("", 24), RowBudget("", 3)], 3)
        assert plan.ks in ([24, 24, 3], [0, 0, 0])
        trees = plan.ks[0] > 0
        kept = (
            [next((depth for depth in range(5) if chance.random() > alpha), 5) for _ in plan.ks]
            if trees
            else []
        )
        offers = [RowResult("", k, min(depth, k)) for k, depth in zip(plan.ks, kept, strict=False)]
        seconds = (1e-2 + tree_s * trees) * chance.uniform(0.95, 1.05)
        control.observe(RoundResult(plan, 3, 3, max(plan.ks), seconds, False, offers, sum(plan.ks)))
        grown += trees and number >= 100
    assert (grown > 450) if pays else (grown < 50)


def test_a_slower_machine_is_noticed_once_by_rounds_of_many_k() -> None:
    """Drafts from text are as long as they are found: rounds of all k show the machine's pace."""
    times, usual_s = RoundTimes(), [0.01 + 0.0005 * k for k in range(9)]
    for pace in (1.0, 1.4, 0.8):
        for _ in range(40):
            for k, seconds in enumerate(usual_s):
                times.add(k, pace * seconds, usual=True)
                if times.counts.get(8, 0) > 4:
                    ratios = [found / each for found, each in zip(times.by_k, usual_s)]
                    assert min(ratios) > 0.79 and max(ratios) < 1.41
        assert times.by_k == pytest.approx([pace * seconds for seconds in usual_s], rel=0.05)
