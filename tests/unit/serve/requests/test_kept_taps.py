"""Taps that requests keep, held against a list of positions."""

from __future__ import annotations

import random
import weakref

import numpy as np
import torch

from draftsmith.serve.requests.kept_taps import (
    MOST_LATE,
    SharedTaps,
    drop_taps,
    keep_taps,
    wants_taps,
)
from draftsmith.serve.requests.request import Request, TapLog
from draftsmith.serve.sampling.params import SamplingParams


def request(name: str, k: int = 3) -> Request:
    return Request(name, [0], 1, SamplingParams(), seed=0, k=k, max_tokens=99)


def kept(one: Request) -> list[float]:
    """First number of the taps of each position."""
    return [row[0] for piece in one.draft.taps for row in piece[:].tolist()]


def passed(shared: SharedTaps, taps: torch.Tensor, *, late: bool) -> None:
    """Add a pass of two taps, raw 1 and 3 of all states."""
    if not late:
        shared.add(taps)
        return
    first, second = taps[None].float().split(1, dim=-1)
    other = torch.full_like(first, -1.0)
    shared.add_late([other, other, first, other, second], (1, 3))


def test_passes_that_are_shared_give_each_row_its_own_taps() -> None:
    rows = [request("a"), request("b", k=0), request("c")]
    rows[2].draft.lost_taps = True
    shared = SharedTaps(rows)
    for position in range(5):
        shared.add(torch.tensor([[position, 1], [10 + position, 1], [20 + position, 1]]))
    assert kept(rows[0]) == [0, 1, 2, 3, 4]
    assert rows[1].draft.taps == rows[2].draft.taps == []
    assert rows[0].draft.taps[0][1:3].tolist() == [[1, 1], [2, 1]]
    assert rows[0].draft.taps[0][5:].shape == (0, 2)


def test_a_part_of_the_passes_is_that_of_its_positions() -> None:
    """However the passes were joined."""
    rows = [request("a"), request("b")]
    shared = SharedTaps(rows)
    for position in range(MOST_LATE + 6):
        taps = torch.tensor([[float(position), 0.0], [100.0 + position, 0.0]])
        passed(shared, taps, late=position not in (3, 4))
    (piece,) = rows[1].draft.taps
    positions = list(range(MOST_LATE + 6))
    for begin in range(len(positions) + 2):
        for end in range(begin, len(positions) + 2):
            found = piece[begin:end]
            assert found.shape == (len(positions[begin:end]), 2)
            assert found[:, 0].tolist() == [100.0 + one for one in positions[begin:end]]


def test_a_part_of_the_passes_does_not_hold_the_others() -> None:
    rows = [request("a"), request("b")]
    shared = SharedTaps(rows)
    for _ in range(MOST_LATE):
        passed(shared, torch.zeros(2, 2), late=True)
    part = rows[0].draft.taps[0][2:4]
    assert part.untyped_storage().nbytes() == part.numel() * part.element_size()


def test_rows_are_the_same_while_none_starts_again() -> None:
    rows = [request("a"), request("b")]
    shared = SharedTaps(rows)
    assert shared.are_of(rows) and not shared.are_of(rows[:1]) and not shared.are_of(rows[::-1])
    rows[1].forget_caches()
    assert not shared.are_of(rows), "it has none of the passes before"


def test_a_draft_that_starts_again_frees_its_taps_at_once() -> None:
    one = request("a")
    shared = SharedTaps([one])
    passed(shared, torch.tensor([[0.0, 1.0]]), late=True)
    kept = weakref.ref(shared)
    del shared
    assert kept() is not None
    one.forget_caches()
    assert kept() is None, "without a run of the garbage collector"


def test_kept_taps_are_those_of_the_positions_that_are_not_cached() -> None:
    chance = random.Random(0)
    rows = [request("a"), request("b")]
    ends = [0, 0]  # positions that the target has read
    shared: SharedTaps | None = None
    for _ in range(400):
        if chance.random() < 0.6:
            if shared is None or not shared.are_of(rows):
                shared = SharedTaps(rows)
            passed(
                shared, torch.tensor([[float(end), 0] for end in ends]), late=chance.random() < 0.7
            )
            ends = [end + 1 for end in ends]
        else:
            shared = None
            for index, one in enumerate(rows):
                count = chance.randint(1, 4)
                taps = torch.tensor([[float(ends[index] + i), 0] for i in range(-1, count)])
                keep_taps(one, taps, 1, count)
                ends[index] += count
                if chance.random() < 0.3:
                    drop_taps(one, chance.randint(one.draft.cached, ends[index]))
        for index, one in enumerate(rows):
            assert kept(one) == list(range(one.draft.cached, ends[index]))
            assert sum(map(len, one.draft.taps)) == ends[index] - one.draft.cached


def test_taps_are_wanted_while_a_draft_or_a_record_may_read_them() -> None:
    one = request("a")
    assert wants_taps(one) and not wants_taps(request("b", k=0))
    one.draft.lost_taps = True
    assert not wants_taps(one)
    one.recording.tap_log = TapLog(8)
    assert wants_taps(one)
    one.recording.tap_log = TapLog(0)
    assert not wants_taps(one), "it is full"
    one.draft.lost_taps = False
    assert wants_taps(one)


def states(begin: int, count: int) -> np.ndarray:
    return np.arange(begin, begin + count, dtype=np.uint16)[:, None].repeat(2, axis=1)


def test_states_read_again_stay_and_those_beyond_the_last_position_are_left_out() -> None:
    log = TapLog(8)
    log.add(0, states(0, 3))
    log.add(1, states(100, 4))  # positions 1 and 2 for the second time
    assert log.end == 5 and not log.is_full
    assert log.between(0, 5)[:, 0].tolist() == [0, 1, 2, 102, 103]
    log.add(5, states(5, 9))
    assert log.end == 8 and log.is_full
    assert log.between(6, 8)[:, 0].tolist() == [6, 7]
    assert log.between(6, 9) is None and log.between(4, 4) is None


def test_what_comes_behind_a_hole_is_not_kept() -> None:
    log = TapLog(8)
    log.add(0, states(0, 2))
    log.add(3, states(3, 2))
    assert log.has_hole and log.is_full
    log.add(2, states(2, 6))
    assert log.end == 2 and log.between(0, 2)[:, 0].tolist() == [0, 1]
    assert TapLog(4).between(0, 1) is None
