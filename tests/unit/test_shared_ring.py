from __future__ import annotations

import os
import subprocess
import sys
from collections import deque

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from draftsmith.fleet.recording.messages import MessageKind, RequestMeta, meta_array, parse
from draftsmith.shared_ring import ALIGN, STATUS, STATUS_TURN, Ring, begin, send


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


def test_an_uncommitted_message_is_not_seen_and_a_discarded_one_not_read() -> None:
    ring = Ring.create(1024)
    assert ring.place(10) is not None and ring.next() is None
    ring.commit()
    assert ring.next() is not None
    ring.discard()
    assert ring.next() is None


def test_a_status_flows_back_whole_or_not_at_all() -> None:
    ring = Ring.create(1024)
    assert ring.status() is None
    ring.leave_status(b"one")
    assert ring.status() == b"one"
    ring.leave_status(b"x" * (STATUS + 1))
    assert ring.status() == b"one"
    ring.leave_status(b"")
    assert ring.status() == b""


def test_another_process_reads_what_outlives_the_writers_end() -> None:
    ring = Ring.create(1 << 16)
    meta = RequestMeta("cmpl-1-0-00000000", "code", 0.5, 1.0, 0, 1.0, 0.0, False, False, 9, [0, 2])
    send(ring, MessageKind.BEGIN, 7, [meta_array(meta), np.arange(5, dtype=np.int32)])
    script = (
        "import sys\nfrom draftsmith.fleet.recording.messages import RequestMeta, parse\n"
        "from draftsmith.shared_ring import Ring\n"
        "ring = Ring(int(sys.argv[1]))\nmessage = parse(ring.next())\n"
        "print(int(message.kind), message.number, message.arrays[1].tolist())\n"
        "print(message.meta(RequestMeta).stops)\nring.release()\nring.share = 0.25\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", script, str(ring.descriptor)],
        pass_fds=[ring.descriptor], capture_output=True, text=True, timeout=120, check=True,
    )  # fmt: skip
    assert done.stdout.splitlines() == ["0 7 [0, 1, 2, 3, 4]", "[0, 2]"]
    assert ring.used == 0 and ring.share == 0.25


@given(
    st.lists(
        st.tuples(
            st.sampled_from(["u1", "i4", "i8", "f4", "u2", "f8"]),
            st.one_of(
                st.tuples(st.integers(0, 9)), st.tuples(st.integers(0, 5), st.integers(0, 5))
            ),
        ),
        max_size=6,
    )
)
@settings(max_examples=40, deadline=None)
def test_arrays_of_a_message_come_back(kinds: list[tuple[str, tuple[int, ...]]]) -> None:
    ring = Ring.create(1 << 14)
    arrays = [
        np.random.default_rng(n).integers(0, 200, shape).astype(kind)
        for n, (kind, shape) in enumerate(kinds)
    ]
    assert send(ring, MessageKind.TOKENS, 2**40, arrays)
    room = ring.next()
    assert room is not None
    message = parse(room)
    assert (message.kind, message.number) == (MessageKind.TOKENS, 2**40)
    for one, other in zip(arrays, message.arrays, strict=True):
        np.testing.assert_array_equal(one, other)
        assert one.dtype == other.dtype


def test_a_message_larger_than_the_ring_is_refused() -> None:
    ring = Ring.create(256)
    assert not send(ring, MessageKind.END, 0, [np.zeros(1000, np.int32)])
    assert begin(ring, MessageKind.END, 0, []) is not None


def test_a_status_is_read_after_a_reader_that_was_killed_while_it_left_one() -> None:
    ring = Ring.create(1 << 12)
    ring.leave_status(b"one")
    ring.numbers[STATUS_TURN] += 1
    assert ring.status() is None
    ring.leave_status(b"two")
    assert ring.status() == b"two" and ring.statuses == 2
