"""Rounds at rest: long after drafting has stopped paying, most rounds are neither chosen for nor
measured."""

from __future__ import annotations

import pytest

from draftsmith.serve.control.auto import LATE, LONGEST, AutoControl
from draftsmith.serve.control.control import RoundResult, RowBudget, RowResult, rest_plan
from draftsmith.serve.control.estimates import TOGETHER


def play(control: AutoControl, rounds: int) -> list[bool]:
    """Rounds of one row whose drafts are never kept; True for those at rest."""
    return [play_round(control, ["a"], 1) is None for _ in range(rounds)]


def play_round(
    control: AutoControl, rows: list[str], num_tokens: int, kept: str = "b"
) -> list[int] | None:
    """k of rows of these classes; None at rest. A draft takes a fifth of the target's time, and is
    kept by the classes of `kept` alone."""
    if control.rests(set(rows), len(rows), num_tokens):
        return None
    plan = control.choose([RowBudget(name, 8) for name in rows], num_tokens)
    offers = [
        RowResult(name, k, k if name in kept else 0)
        for name, k in zip(rows, plan.ks, strict=True)
        if k
    ]
    k = max(plan.ks)
    seconds = 1e-3 * (1 + 0.2 * k)
    control.observe(RoundResult(plan, num_tokens, len(rows), k, seconds, False, offers))
    return plan.ks


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
    assert max(map(len, rests.split("m"))) <= LONGEST - TOGETHER
    measured = [len(part) for part in rests.strip("m").split("r") if part]
    assert len(measured) > 10 and min(measured) >= TOGETHER


@pytest.mark.parametrize("load", [({"b"}, 1, 1), ({"a"}, 2, 2)])
def test_another_class_or_load_is_looked_at_at_once(load: tuple[set[str], int, int]) -> None:
    assert not resting().rests(*load)


def test_another_class_ends_the_rest_for_good() -> None:
    """Also where it was the measured end of a rest that it came in."""
    for begin in range(0, LONGEST, 20):
        control = resting()
        play(control, begin)
        ks = [play_round(control, ["b"], 1) for _ in range(60)]
        assert None not in ks
        assert sum(k is not None and k[0] > 0 for k in ks) > 20


def test_requests_that_are_accepted_draft_between_others_that_never_are() -> None:
    """By turns 1000 tokens of a, which rest, and 60 of b."""
    control = AutoControl()
    for _ in range(4):
        play(control, 1000)
        tokens = rounds = 0
        while tokens < 60:
            ks = play_round(control, ["b"], 1)
            tokens, rounds = tokens + 1 + (ks[0] if ks else 0), rounds + 1
    assert rounds < 40


def test_a_text_that_begins_ends_the_rest() -> None:
    control = resting()
    play(control, 3000)
    control.new_text()
    ks = [play_round(control, ["a"], 1, kept="a") for _ in range(60)]
    assert sum(k is not None and k[0] > 0 for k in ks) > 30


def test_texts_whose_drafts_are_never_kept_cost_little_each() -> None:
    control, ks = AutoControl(), []
    for _ in range(40):
        control.new_text()
        ks += [(play_round(control, ["a"], 1) or [0])[0] for _ in range(100)]
    assert 0 < sum(ks[500:]) <= 0.12 * len(ks[500:])  # each a fifth of a round


@pytest.mark.parametrize("rows", [["a", "b"], ["b", "b"]])
def test_a_class_that_comes_as_another_row_ends_the_rest(rows: list[str]) -> None:
    control = AutoControl()
    while play_round(control, ["a", "a"], 2) is not None:
        pass
    assert None not in [play_round(control, rows, 2) for _ in range(LATE)]


def test_a_rest_that_was_left_for_another_load_is_not_caught_up_on() -> None:
    control = resting()
    for _ in range(LONGEST):
        play_round(control, ["a", "a"], 2)
    rests = play(control, 3 * LATE)
    assert not any(rests[:TOGETHER]), "what it takes is measured first"


def test_a_new_draft_ends_the_rest() -> None:
    control = resting()
    assert control.rests({"a"}, 1, 1)
    control.new_draft()
    assert not control.rests({"a"}, 1, 1)
    assert any(control.choose([RowBudget("a", 8)], 1).ks[0] > 0 for _ in range(2)), "a trial"


def test_a_plan_at_rest_drafts_nothing() -> None:
    assert rest_plan(3).ks == [0, 0, 0] and rest_plan(3).at_rest
