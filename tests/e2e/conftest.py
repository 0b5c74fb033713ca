"""Servers started as users start them, and clients that no one here wrote, each in an environment
of its own.

`scripts/test --all` makes the environments under `.venv-clients` and names that folder in
DRAFTSMITH_CLIENTS.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import httpx
import pytest
from prometheus_client.parser import text_string_to_metric_families
from prometheus_client.samples import Sample

from tests.e2e.workshop import with_noise
from tests.waiting import wait_until

START_S = 120


class ServerProcess:
    def __init__(self, url: str, process: subprocess.Popen[bytes], log: Path):
        self.url, self.process, self.log = url, process, log

    def metric(self, name: str) -> float:
        """Summed over its labels."""
        return sum(sample.value for sample in self.samples(name))

    def labelled(self, name: str, label: str) -> dict[str, float]:
        return {sample.labels[label]: sample.value for sample in self.samples(name)}

    def samples(self, name: str) -> list[Sample]:
        families = text_string_to_metric_families(httpx.get(f"{self.url}/metrics", timeout=30).text)
        return [one for family in families for one in family.samples if one.name == name]

    def stop(self) -> None:
        self.process.send_signal(signal.SIGTERM)
        assert self.process.wait(timeout=60) == 0, self.log.read_text()


@pytest.fixture(scope="session")
def near_draft(tiny_target: Callable[..., str], tmp_path_factory: pytest.TempPathFactory) -> str:
    """A draft LM that agrees with the tiny target often but not always."""
    folder = tmp_path_factory.mktemp("near-draft") / "model"
    return str(with_noise(Path(tiny_target("llama")), folder, 0.06))


@pytest.fixture(scope="module")
def launch(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Callable[..., ServerProcess]]:
    """`launch(command, env=..., cwd=...)` is a `draftsmith serve --name tiny`, given a free port
    and one thread, and stopped after the module."""
    servers: list[ServerProcess] = []

    def start(command: Sequence[str], **places: Any) -> ServerProcess:
        log = tmp_path_factory.mktemp("server") / "log.txt"
        with log.open("wb") as stream:
            whole = [*command, "--port", "0", "--threads", "1"]
            process = subprocess.Popen(whole, stderr=stream, **places)
        servers.append(ServerProcess(_address(process, log), process, log))
        return servers[-1]

    yield start
    for server in servers:
        server.stop()


@pytest.fixture(scope="module")
def start_server(
    tiny_target: Callable[..., str], launch: Callable[..., ServerProcess]
) -> Callable[..., ServerProcess]:
    """`start_server("--k", "3", ...)` is a `draftsmith serve` of the tiny target."""
    script = str(Path(sys.executable).with_name("draftsmith"))
    command = (script, "serve", "--target", tiny_target("llama"), "--name", "tiny")
    return lambda *flags: launch([*command, *flags])


def _address(process: subprocess.Popen[bytes], log: Path) -> str:
    told = "serving 'tiny' on "
    wait_until(lambda: told in log.read_text(), START_S, process=process, said=log.read_text)
    return log.read_text().split(told)[1].split()[0]


@pytest.fixture(scope="session")
def run_client() -> Callable[..., str]:
    """`run_client("aiperf", "bin/aiperf", *arguments, cwd=...)` runs it to its end and gives what
    it printed."""

    def run(
        name: str, program: str, *arguments: str, cwd: Path, statuses: Sequence[int] = (0,)
    ) -> str:
        assert "DRAFTSMITH_CLIENTS" in os.environ, (
            "DRAFTSMITH_CLIENTS names no folder of clients; run scripts/test --all"
        )
        path = Path(os.environ["DRAFTSMITH_CLIENTS"]) / name / program
        assert path.exists(), f"{path} is missing; run scripts/test --all"
        environment = os.environ | {"OMP_NUM_THREADS": "1", "NO_COLOR": "1", "COLUMNS": "160"}
        streams: Any = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "text": True}
        finished = subprocess.run([str(path), *arguments], cwd=cwd, env=environment, **streams)
        assert finished.returncode in statuses, (
            f"{name} ended with status {finished.returncode}:\n{finished.stdout[-6000:]}"
        )
        return finished.stdout

    return run
