"""Status of the daemon: a line for people, `VERSIONS/status.json` for programs, and both over HTTP
(JSON and Prometheus text)."""

from __future__ import annotations

import json
import os
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import suppress
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any, TextIO

from prometheus_client import CONTENT_TYPE_LATEST, CollectorRegistry, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric

from draftsmith import files
from draftsmith.distill.state import TOTALS
from draftsmith.errors import UserError

STATUS = "status.json"


class Status:
    """Status whose `show` writes the file at each change, and the line at most once per
    interval."""

    def __init__(self, versions: str | Path, stream: TextIO | None = None):
        self.path = Path(versions) / STATUS
        self.stream = stream or sys.stderr
        self.is_terminal = self.stream.isatty()
        self.interval_s = 0.5 if self.is_terminal else 10.0
        self.shown_s = float("-inf")
        self.width = 0
        self.values: dict[str, Any] = {}  # as last shown

    def show(self, line: str, values: dict[str, Any]) -> None:
        self.values = files.plain({"time_s": time.time(), "pid": os.getpid(), **values})
        files.write_json(self.path, self.values)
        if time.monotonic() - self.shown_s < self.interval_s:
            return
        self.shown_s = time.monotonic()
        text = f"distill: {line}"
        if self.is_terminal:
            self._write("\r" + text.ljust(self.width))
            self.width = len(text)
        else:
            self._write(text + "\n")

    def close(self) -> None:
        """Leaves word for the views that the learner has ended."""
        if self.values:
            with suppress(OSError):
                files.write_json(self.path, {**self.values, "time_s": time.time(), "stopped": True})

    def event(self, text: str) -> None:
        """Prints a line that stays."""
        erased = "\r" + " " * self.width + "\r" if self.is_terminal and self.width else ""
        self._write(f"{erased}distill: {text}\n")
        self.width = 0

    def _write(self, text: str) -> None:
        """Writes a line. A full disk is no reason to stop: `decisions.jsonl` has the decisions."""
        with suppress(OSError):
            self.stream.write(text)
            self.stream.flush()


PREFIX = "draftsmith_learner_"


class StatusCollector:
    """Prometheus metrics of every number of the status; totals since the first start are
    counters."""

    def __init__(self, status: Status):
        self.status = status

    def collect(self) -> Iterator[Metric]:
        for name, value in self.status.values.items():
            if isinstance(value, (int, float)):
                kind = CounterMetricFamily if name in TOTALS else GaugeMetricFamily
                yield kind(
                    PREFIX + name,
                    f"{name.replace('_', ' ')}, as in status.json",
                    value=float(value),
                )
        yield from self._losslessness()

    def _losslessness(self) -> Iterator[Metric]:
        """Gauges of the monitor, by stream: all records, and each engine's version."""
        streams = self.status.values.get("losslessness") or {}
        gauges: dict[str, GaugeMetricFamily] = {}
        for stream, numbers in streams.items():
            labels = [stream, numbers.get("engine", ""), numbers.get("version", "")]
            for name, value in numbers.items():
                if isinstance(value, str):
                    continue
                if name not in gauges:
                    gauges[name] = GaugeMetricFamily(
                        f"{PREFIX}lossless_{name}",
                        f"{name.replace('_', ' ')} of the records, as in status.json",
                        labels=["records", "engine", "version"],
                    )
                gauges[name].add_metric(labels, float(value))
        yield from gauges.values()


class StatusServer:
    """HTTP server of the status on a thread of its own, until `close`."""

    def __init__(self, status: Status, host: str, port: int):
        registry = CollectorRegistry()
        registry.register(StatusCollector(status))
        try:
            self._server = ThreadingHTTPServer((host, port), handler(status, registry))
        except (OSError, OverflowError) as error:
            raise UserError(
                f"the status cannot be served at {host}:{port} ({error}); choose another "
                "--status-port"
            ) from error
        self.port = int(self._server.server_address[1])
        self._thread = threading.Thread(
            target=self._server.serve_forever, name="draftsmith-status", daemon=True
        )
        self._thread.start()

    def close(self) -> None:
        self._server.shutdown()
        self._server.server_close()
        self._thread.join()


def handler(status: Status, registry: CollectorRegistry) -> type[BaseHTTPRequestHandler]:
    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            if self.path == "/":
                self._answer(
                    200, "application/json", json.dumps(status.values, indent=2).encode() + b"\n"
                )
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
            """Prints nothing per scrape."""

    return Handler
