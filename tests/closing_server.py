"""Server that closes kept connections under the next request, as llama-server sometimes does."""

from __future__ import annotations

import socket
import threading

ANSWER = b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\ncontent-length: %d\r\n\r\n%s"
EVENT = b'data: {"choices": [{"text": "a"}], "usage": {"completion_tokens": 1}}\n\n'


class Closing:
    """Server that answers `answers` requests a connection, then reads one more and closes."""

    def __init__(self, answers: int):
        self.answers, self.connections, self.requests = answers, 0, 0
        self.listening = socket.create_server(("127.0.0.1", 0))
        self.url = f"http://127.0.0.1:{self.listening.getsockname()[1]}"
        threading.Thread(target=self._accept, daemon=True).start()

    def _accept(self) -> None:
        while True:
            try:
                connection, _ = self.listening.accept()
            except OSError:
                return
            self.connections += 1
            threading.Thread(target=self._serve, args=(connection,), daemon=True).start()

    def _serve(self, connection: socket.socket) -> None:
        with connection:
            for _ in range(self.answers):
                if not self._read(connection):
                    return
                connection.sendall(ANSWER % (len(EVENT), EVENT))
            self._read(connection)

    def _read(self, connection: socket.socket) -> bool:
        """Reads one request with its body, which is short; False at the end of the connection."""
        got = b""
        while b"\r\n\r\n" not in got:
            piece = connection.recv(65536)
            if not piece:
                return False
            got += piece
        head, _, body = got.partition(b"\r\n\r\n")
        lengths = [
            int(line.split(b":")[1])
            for line in head.lower().split(b"\r\n")
            if line.startswith(b"content-length")
        ]
        while lengths and len(body) < lengths[0]:
            body += connection.recv(65536)
        self.requests += 1
        return True
