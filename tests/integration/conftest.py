"""A real server on a real socket, in a thread of the test's process."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator

import httpx
import pytest
import uvicorn

from draftsmith.drafters.interface import ServingDrafter
from draftsmith.drafters.target import Target
from draftsmith.serve.api_gate import Limits
from draftsmith.serve.api_report import Level
from draftsmith.serve.config import EngineConfig
from draftsmith.serve.dashboard import Dashboard
from draftsmith.serve.dashboard_samples import History
from draftsmith.serve.engine import Engine
from draftsmith.serve.http import Server, create_app
from draftsmith.serve.loop import EngineLoop
from draftsmith.serve.metrics import ServerMetrics
from draftsmith.serve.record import Sink
from draftsmith.serve.run import bind

MODEL = "tiny"
DEFAULT_LIMITS = Limits()


class LiveServer:
    def __init__(self, engine: Engine, limits: Limits, report: Level):
        self.engine, self.loop = engine, EngineLoop(engine).start()
        listener = bind("127.0.0.1", 0)
        self.url = f"http://127.0.0.1:{listener.getsockname()[1]}"
        metrics = ServerMetrics(engine, MODEL)
        # Not started: its tests look when they want to.
        self.dashboard = Dashboard(History(engine, metrics.by_class))
        app = create_app(Server(self.loop, MODEL, metrics, limits, report, dashboard=self.dashboard))
        self._server = uvicorn.Server(uvicorn.Config(app, log_level="error", timeout_graceful_shutdown=5))
        self._thread = threading.Thread(target=self._server.run, kwargs={"sockets": [listener]}, daemon=True)
        self._thread.start()
        self.http = httpx.Client(base_url=self.url, timeout=60)
        while not self._server.started:
            time.sleep(0.01)

    def complete(self, prompt: object, **parameters: object) -> httpx.Response:
        return self.http.post("/v1/completions", json={"model": MODEL, "prompt": prompt, **parameters})

    def metric(self, name: str, **labels: str) -> float:
        from prometheus_client.parser import text_string_to_metric_families

        for family in text_string_to_metric_families(self.http.get("/metrics").text):
            for sample in family.samples:
                if sample.name == name and labels.items() <= sample.labels.items():
                    return sample.value
        raise KeyError(name)

    def close(self) -> None:
        self.http.close()
        self._server.should_exit = True
        self._thread.join()
        self.loop.close()


@pytest.fixture(scope="module")
def live_server() -> Iterator[Callable[..., LiveServer]]:
    """`live_server(target, drafter, config, sink=, limits=, report=)`; all are closed at the end of the module."""
    servers: list[LiveServer] = []

    def start(
        target: Target,
        drafter: ServingDrafter | None,
        config: EngineConfig,
        *,
        sink: Sink | None = None,
        limits: Limits = DEFAULT_LIMITS,
        report: Level = "none",
    ) -> LiveServer:
        servers.append(LiveServer(Engine(target, drafter, config, sink=sink), limits, report))
        return servers[-1]

    yield start
    for server in servers:
        server.close()
