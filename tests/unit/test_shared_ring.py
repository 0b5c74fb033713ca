from __future__ import annotations

import os
from collections import deque

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from draftsmith.shared_ring import ALIGN, STATUS_TURN, Ring


@settings(max_examples=60, deadline=None)
@given(
    st.lists(st.one_of(st.integers(0, 400), st.just("read")), max_size=200),
    st.sampled_from([64, 256, 1008]),
)
def test_what_is_written_is_read_once_in_order_and_a_full_ring_takes_nothing(
    steps: list[int | str], capacity: int
) -> None:
    ring = Ring.create(capacity)
    end = Ring(os.dup(ring.descriptor))
    waiting: deque[bytes] = deque()
    for number, step in enumerate(steps):
        if step == "read":
            found = end.next()
            assert (None if found is None else found.tobytes()) == (
                waiting.popleft() if waiting else None
            )
            if found is not None:
                end.release()
            continue
        assert isinstance(step, int)
        data = np.random.default_rng(number).integers(0, 255, step, np.uint8).tobytes()
        begin = ring.place(step)
        if begin is None:
            # Half of it, without the header's part, always has room once it is empty.
            assert waiting or step > capacity // 2 - 2 * ALIGN
            continue
        ring.bytes[begin : begin + step] = np.frombuffer(data, np.uint8)
        ring.commit()
        waiting.append(data)
        assert ring.used <= capacity
    while waiting:
        found = end.next()
        assert found is not None and found.tobytes() == waiting.popleft()
        end.release()
    assert end.next() is None and ring.used == 0
    os.close(end.descriptor)


def test_a_status_is_read_after_a_reader_that_was_killed_while_it_left_one() -> None:
    ring = Ring.create(1 << 12)
    ring.leave_status(b"one")
    ring.numbers[STATUS_TURN] += 1
    assert ring.status() is None
    ring.leave_status(b"two")
    assert ring.status() == b"two" and ring.statuses == 2
