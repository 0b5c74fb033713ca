"""Prometheus text at a port."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

from prometheus_client import CollectorRegistry, start_http_server
from prometheus_client.registry import Collector

from draftsmith.errors import UserError


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
