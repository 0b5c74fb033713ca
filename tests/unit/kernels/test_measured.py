"""Choices follow the clock, are made once, and outlive the process."""

from __future__ import annotations

import json
import multiprocessing
import time
from collections.abc import Callable, Mapping
from pathlib import Path

import pytest
import torch

from draftsmith.kernels.measured import AFTER_S, MOST_S, TURNS, VARIABLE, Choices, Way, timed

NAMES = ("own", "torch", "packed")


class MadeUpTimes:
    """A clock of given seconds, which counts what it is asked."""

    def __init__(self, **seconds: float):
        self.seconds, self.asked = seconds, [""][:0]

    def __call__(self, name: str, way: Way) -> float:
        self.asked.append(name)
        return self.seconds[name]


def ways() -> Mapping[str, Way]:
    return {name: lambda: None for name in NAMES}


def never() -> Mapping[str, Way]:
    raise AssertionError("nothing is to be timed")


def chosen(choices: Choices, prepare: Callable[[], Mapping[str, Way]] = ways, **changes) -> str:
    return choices.fastest("product", (torch.float32, 8, 16), NAMES, prepare, **changes)


@pytest.fixture(autouse=True)
def _as_it_is(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(VARIABLE, raising=False)


@pytest.mark.parametrize("fastest", NAMES)
def test_the_fastest_way_is_taken(tmp_path: Path, fastest: str) -> None:
    clock = MadeUpTimes(**(dict.fromkeys(NAMES, 2.0) | {fastest: 1.0}))
    choices = Choices(tmp_path, clock)
    assert chosen(choices) == fastest
    # In turns, but those far behind after the first.
    assert clock.asked == [*NAMES, *[fastest] * (TURNS - 1)]
    (known,) = choices.known()
    assert known.way == fastest and known.seconds == clock.seconds
    assert (known.kind, known.shape) == ("product", "float32 8 16")


def test_a_call_that_other_work_came_between_is_timed_again() -> None:
    calls, interrupted = [], iter([0, 1, 1, 2, 2, 2])

    def way() -> None:
        calls.append(None)
        time.sleep(0.05 if len(calls) < 3 else 0.0)

    assert timed("way", way, lambda: next(interrupted)) < 0.05 and len(calls) == 3
    calls.clear()
    always = iter(range(100))
    assert timed("way", way, lambda: next(always)) < 0.05 and len(calls) == 5


def test_a_choice_is_kept_for_the_next_process_and_made_again_when_asked(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    first = Choices(tmp_path, MadeUpTimes(own=3, torch=2, packed=1))
    assert chosen(first) == chosen(first, never) == "packed"
    faster = MadeUpTimes(own=1, torch=2, packed=3)
    assert chosen(Choices(tmp_path, faster), never) == "packed" and not faster.asked
    monkeypatch.setenv(VARIABLE, "off")
    assert chosen(Choices(tmp_path, faster), never) == "own"
    monkeypatch.setenv(VARIABLE, "again")
    again = Choices(tmp_path, faster)
    assert chosen(again) == chosen(again, never) == "own"
    monkeypatch.delenv(VARIABLE)
    assert chosen(Choices(tmp_path), never) == "own"


def test_what_was_timed_on_a_busy_machine_is_timed_again_by_a_later_start(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    beside = MadeUpTimes(own=3, torch=2, packed=1)
    assert chosen(Choices(tmp_path, beside, busy=lambda: True)) == "packed"
    alone = MadeUpTimes(own=1, torch=2, packed=3)
    together = Choices(tmp_path, alone, busy=lambda: False)
    assert chosen(together, never) == "packed", "else processes that train together would differ"
    a_later_start = time.time() + AFTER_S + 1
    monkeypatch.setattr("draftsmith.kernels.measured.time", lambda: a_later_start)
    later = Choices(tmp_path, alone, busy=lambda: False)
    with_it = Choices(tmp_path, MadeUpTimes(own=3, torch=1, packed=2), busy=lambda: False)
    assert later.known() == with_it.known() != []
    assert chosen(later) == chosen(later, never) == chosen(with_it) == "own"
    assert chosen(Choices(tmp_path, beside), never) == "own", "what was timed alone is kept"


def test_other_sources_shapes_and_threads_are_other_choices(tmp_path: Path) -> None:
    source = tmp_path / "kernel.cpp"
    source.write_text("one", encoding="utf-8")
    times = MadeUpTimes(own=3, torch=2, packed=1)
    choices = Choices(tmp_path, times)
    assert chosen(choices, sources=[source]) == chosen(choices) == "packed"
    times.seconds["own"] = 0.5
    assert chosen(choices, never, sources=[source]) == "packed"
    source.write_text("two", encoding="utf-8")
    assert chosen(choices, sources=[source]) == "own"
    assert choices.fastest("product", (torch.bfloat16, 8, 16), NAMES, ways) == "own"
    threads = torch.get_num_threads()
    try:
        torch.set_num_threads(threads + 1)
        assert chosen(choices) == "own"
    finally:
        torch.set_num_threads(threads)
    assert chosen(choices, never) == "packed"


def test_timing_ends_after_its_share_of_the_start(tmp_path: Path) -> None:
    """What is not timed takes the first way, and is not kept."""
    choices = Choices(tmp_path, MadeUpTimes(own=2, torch=1, packed=3), most_s=0.0)
    assert chosen(choices, never) == "own" and choices.known() == []
    assert chosen(Choices(tmp_path, MadeUpTimes(own=2, torch=1, packed=3))) == "torch"
    assert MOST_S <= 1.0


@pytest.mark.parametrize("damage", ["", "[]", "{}", '{"schema_version": 1, "choices": {"a": {}}}'])
def test_a_damaged_file_is_made_anew(tmp_path: Path, damage: str) -> None:
    times = MadeUpTimes(own=3, torch=2, packed=1)
    chosen(Choices(tmp_path, times))
    (path,) = tmp_path.glob("*.json")
    path.write_text(damage, encoding="utf-8")
    assert chosen(Choices(tmp_path, times)) == "packed"
    assert json.loads(path.read_text(encoding="utf-8"))["schema_version"] == 1
    assert chosen(Choices(tmp_path), never) == "packed"


def test_a_folder_that_cannot_be_written_costs_the_next_start_its_timing(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("", encoding="utf-8")
    choices = Choices(tmp_path / "file" / "below", MadeUpTimes(own=3, torch=2, packed=1))
    assert chosen(choices) == chosen(choices, never) == "packed"


def measure(folder: Path, number: int) -> str:
    order = NAMES if number % 2 else NAMES[::-1]
    times = MadeUpTimes(**{name: 1.0 + place for place, name in enumerate(order)})
    return chosen(Choices(folder, times))


def test_processes_that_start_together_take_the_same_ways(tmp_path: Path) -> None:
    """Else training spread over them would multiply differently in each."""
    with multiprocessing.get_context("fork").Pool(4) as pool:
        found = pool.starmap(measure, [(tmp_path, number) for number in range(8)])
    assert len(set(found)) == 1


def test_what_was_taken_is_told_with_the_second_best(tmp_path: Path) -> None:
    choices = Choices(tmp_path, MadeUpTimes(own=0.003, torch=0.001, packed=0.002))
    assert choices.lines() == []
    chosen(choices)
    (line,) = choices.lines()
    assert line == "product, float32 8 16: torch, 1.00 ms (packed 2.00 ms)"
    assert Choices(tmp_path).lines() == [], "others' choices are not this process's"
