"""The learner's status over HTTP: JSON for people and scripts at `/`, and `/metrics` for Prometheus."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

from prometheus_client import CONTENT_TYPE_LATEST, CollectorRegistry, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric

from draftsmith.distill.state import TOTALS
from draftsmith.distill.status import Status
from draftsmith.errors import UserError

PREFIX = "draftsmith_learner_"


class StatusCollector:
    """Every number of the status; totals since the first start are counters."""

    def __init__(self, status: Status):
        self.status = status

    def collect(self) -> Iterator[Metric]:
        for name, value in self.status.values.items():
            if isinstance(value, (int, float)):
                kind = CounterMetricFamily if name in TOTALS else GaugeMetricFamily
                yield kind(PREFIX + name, f"{name.replace('_', ' ')}, as in status.json", value=float(value))


class StatusServer:
    """Serves on a thread of its own until `close`."""

    def __init__(self, status: Status, host: str, port: int):
        registry = CollectorRegistry()
        registry.register(StatusCollector(status))
        try:
            self._server = ThreadingHTTPServer((host, port), handler(status, registry))
        except (OSError, OverflowError) as error:
            raise UserError(f"the status cannot be served at {host}:{port} ({error}); choose another --status-port") from error
        self.port = int(self._server.server_address[1])
        self._thread = threading.Thread(target=self._server.serve_forever, name="draftsmith-status", daemon=True)
        self._thread.start()

    def close(self) -> None:
        self._server.shutdown()
        self._server.server_close()
        self._thread.join()


def handler(status: Status, registry: CollectorRegistry) -> type[BaseHTTPRequestHandler]:
    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            if self.path == "/":
                self._answer(200, "application/json", json.dumps(status.values, indent=2).encode() + b"\n")
            elif self.path == "/metrics":
                self._answer(200, CONTENT_TYPE_LATEST, generate_latest(registry))
            else:
                self._answer(404, "text/plain", b"only / and /metrics are served here\n")

        def _answer(self, code: int, kind: str, body: bytes) -> None:
            self.send_response(code)
            self.send_header("Content-Type", kind)
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, format: str, *args: object) -> None:
            """One line an event is for people; a scrape is none."""

    return Handler
