"""Trainers that take turns: order, random numbers, and what ends all of them."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

from draftsmith.errors import UserError
from draftsmith.train.turns import Turns


def passes(
    turns: Turns, number: int, count: int, done: list[tuple[int, int]]
) -> Callable[[], None]:
    """Trainer of `count` passes; writes down (trainer, pass) of each."""

    def work() -> None:
        for at in range(count):
            turns.begin_pass(number)
            done.append((number, at))

    return work


def test_one_pass_each_in_turn_and_the_longer_run_ends_alone() -> None:
    turns, done = Turns([0, 0]), []
    turns.run([passes(turns, 0, 2, done), passes(turns, 1, 4, done)])
    assert done == [(0, 0), (1, 0), (0, 1), (1, 1), (1, 2), (1, 3)]


def test_the_one_behind_catches_up_first() -> None:
    turns, done = Turns([4, 2]), []
    turns.run([passes(turns, 0, 2, done), passes(turns, 1, 4, done)])
    assert done == [(1, 0), (1, 1), (0, 0), (1, 2), (0, 1), (1, 3)]


def test_random_numbers_are_those_of_a_run_alone() -> None:
    drawn: dict[int, list[float]] = {0: [], 1: []}
    turns = Turns([0, 0])

    def work(number: int) -> None:
        for _ in range(3):
            turns.begin_pass(number)
            drawn[number].append(float(torch.rand(())))

    torch.manual_seed(5)
    alone = [float(torch.rand(())) for _ in range(3)]
    torch.manual_seed(5)
    turns.run([lambda: work(0), lambda: work(1)])
    assert drawn == {0: alone, 1: alone}


@pytest.mark.parametrize("error", [UserError("lower the rate"), KeyboardInterrupt()])
def test_the_first_error_ends_all(error: BaseException) -> None:
    turns, done = Turns([0, 0]), []

    def failing() -> None:
        turns.begin_pass(1)
        turns.begin_pass(1)
        raise error

    with pytest.raises(type(error)) as caught:
        turns.run([passes(turns, 0, 9, done), failing])
    assert caught.value is error and len(done) <= 3
