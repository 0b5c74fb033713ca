"""Ports of this machine: free ones, and one that leads to another and can be shut."""

from __future__ import annotations

import socket
import threading
from contextlib import suppress


class Door:
    """A port that leads to another one of this machine, and can be shut: moto keeps its buckets in
    memory, so that the server itself has to stay."""

    def __init__(self, leads_to: int):
        self.leads_to = leads_to
        self._listener = bound(0)
        self.port = int(self._listener.getsockname()[1])
        self._is_open = False
        self._open: set[socket.socket] = set()
        self._lock = threading.Lock()

    def open(self) -> None:
        if self._is_open:
            return
        self._is_open = True
        self._listener.listen(64)
        threading.Thread(target=self._accept, args=(self._listener,), daemon=True).start()

    def shut(self) -> None:
        """Refuse connections and end those that are there."""
        self._is_open = False
        with suppress(OSError):
            self._listener.shutdown(socket.SHUT_RDWR)
        self._listener.close()
        # Bound and deaf, so that no one else takes the port meanwhile.
        self._listener = bound(self.port)
        with self._lock:
            for one in self._open:
                with suppress(OSError):
                    one.shutdown(socket.SHUT_RDWR)
            self._open.clear()

    def close(self) -> None:
        self.shut()
        self._listener.close()

    def _accept(self, listener: socket.socket) -> None:
        while True:
            try:
                near, _ = listener.accept()
            except OSError:
                return
            try:
                far = socket.create_connection(("127.0.0.1", self.leads_to))
            except OSError:
                near.close()
                continue
            with self._lock:
                is_shut = self._listener is not listener
                self._open |= set() if is_shut else {near, far}
            if is_shut:
                near.close()
                far.close()
                return
            for one, other in ((near, far), (far, near)):
                threading.Thread(target=self._pass, args=(one, other), daemon=True).start()

    def _pass(self, source: socket.socket, sink: socket.socket) -> None:
        with suppress(OSError):
            while data := source.recv(1 << 16):
                sink.sendall(data)
        with suppress(OSError):
            sink.shutdown(socket.SHUT_WR)
        with self._lock:
            self._open.discard(source)
        source.close()


def bound(port: int) -> socket.socket:
    made = socket.socket()
    made.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    made.bind(("127.0.0.1", port))
    return made


def leads(port: int) -> bool:
    """True where something listens."""
    with socket.socket() as probe:
        return probe.connect_ex(("127.0.0.1", port)) == 0


def free_port() -> int:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        return int(free.getsockname()[1])
