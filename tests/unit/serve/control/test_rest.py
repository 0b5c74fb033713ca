"""Rounds at rest: long after drafting has stopped paying, a short round is neither chosen for nor
measured."""

from __future__ import annotations

import pytest

from draftsmith.serve.control.auto import LATE, REST_S, AutoControl
from draftsmith.serve.control.control import RoundResult, RowBudget, RowResult, rest_plan
from draftsmith.serve.control.latency import TOGETHER
from scripts.bench.engine.control import noticed_ms, scenarios

SHORT_S = 1e-3


def play(
    control: AutoControl, rounds: int, *, round_s: float = SHORT_S, prompt_every: int = 0
) -> list[bool]:
    """Rounds of one row whose drafts are never kept and take a fifth of the target's time each;
    True for those at rest. Every `prompt_every`-th also reads 30 tokens of a prompt."""
    rests = []
    for number in range(rounds):
        num_tokens = 31 if prompt_every and number % prompt_every == 0 else 1
        rests.append(control.rests("a", 1, num_tokens))
        if rests[-1]:
            continue
        plan = control.choose([RowBudget("a", 8)], num_tokens)
        k = plan.ks[0]
        offers = [RowResult("a", k, 0)] if k else []
        control.observe(
            RoundResult(
                plan, num_tokens, 1, k, round_s * (1 + 0.2 * k), False, offers, num_drafted=k
            )
        )
    return rests


def resting() -> AutoControl:
    control = AutoControl()
    while not play(control, 1)[0]:
        pass
    return control


def test_most_short_rounds_rest_where_drafting_never_pays() -> None:
    rests = play(AutoControl(), 6000)
    assert not any(rests[:LATE]), "it has to learn first"
    assert sum(rests[1000:]) >= 0.8 * len(rests[1000:])


def test_rests_end_in_time_and_with_rounds_that_are_measured() -> None:
    rests = "".join("r" if one else "m" for one in play(AutoControl(), 6000))
    assert max(map(len, rests.split("m"))) <= REST_S / SHORT_S - TOGETHER
    measured = [len(part) for part in rests.strip("m").split("r") if part]
    assert len(measured) > 10 and min(measured) >= TOGETHER


def test_rounds_that_take_long_are_all_measured() -> None:
    assert not any(play(AutoControl(), 3000, round_s=REST_S / LATE))


@pytest.mark.parametrize("load", [("b", 1, 1), ("a", 2, 2), ("a", 1, 31)])
def test_another_class_or_load_is_looked_at_at_once(load: tuple[str, int, int]) -> None:
    assert not resting().rests(*load)


def test_a_new_draft_ends_the_rest() -> None:
    control = resting()
    assert control.rests("a", 1, 1)
    control.new_draft()
    assert not control.rests("a", 1, 1)
    assert any(control.choose([RowBudget("a", 8)], 1).ks[0] > 0 for _ in range(2)), "a trial"


def test_prompts_that_are_read_at_rest_count_for_what_a_draft_would_read() -> None:
    """One prompt of 30 tokens for every 40 tokens decided, whichever rounds rest."""
    control = AutoControl()
    rests = play(control, 12000, prompt_every=40)
    assert sum(rests) > 6000
    assert control._fed / control._decided == pytest.approx(30 / 40, rel=0.3)


def test_a_plan_at_rest_drafts_nothing() -> None:
    assert rest_plan(3).ks == [0, 0, 0] and rest_plan(3).at_rest


def test_a_draft_that_becomes_worth_it_after_a_long_rest_is_noticed() -> None:
    scenario = scenarios()["gets good after long rest, small, 1"]
    assert noticed_ms(scenario, AutoControl(), 0) < 3e3
