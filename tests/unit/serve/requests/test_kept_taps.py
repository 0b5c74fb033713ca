"""States of a request's positions that its records hold."""

from __future__ import annotations

import numpy as np

from draftsmith.serve.requests.request import TapLog


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
