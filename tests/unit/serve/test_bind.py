"""The listening socket."""

from __future__ import annotations

import socket

from draftsmith.lock import bind


def test_the_end_of_an_answer_does_not_wait_for_an_acknowledgement():
    with bind("127.0.0.1", 0) as listener, socket.create_connection(listener.getsockname()):
        accepted, _ = listener.accept()
        with accepted:
            assert accepted.getsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY)
