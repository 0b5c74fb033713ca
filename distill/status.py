"""Status of the daemon: a line for people, `VERSIONS/status.json` for programs, and its
numbers for Prometheus."""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any, NamedTuple, TextIO

from prometheus_client import CollectorRegistry, start_http_server
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

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
        """Leaves word for the dashboard that the learner has ended."""
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


class StatusCollector(Collector):
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


class ServedMetrics(NamedTuple):
    port: int
    close: Callable[[], None]


def serve_metrics(collector: Collector, host: str, port: int) -> ServedMetrics:
    """Prometheus text on a thread of its own, until `close`. Port 0 finds one."""
    registry = CollectorRegistry()
    registry.register(collector)
    try:
        server, thread = start_http_server(port, addr=host, registry=registry)
    except (OSError, OverflowError) as error:
        raise UserError(
            f"the status cannot be served at {host}:{port} ({error}); choose another --status-port"
        ) from error

    def close() -> None:
        server.shutdown()
        server.server_close()
        thread.join()

    return ServedMetrics(server.server_port, close)
