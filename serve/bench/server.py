"""A `draftsmith serve` process for the time of a measurement."""

from __future__ import annotations

import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import NamedTuple

import httpx

from draftsmith.client import with_key
from draftsmith.errors import UserError


class ServerProcess(NamedTuple):
    url: str
    pid: int

    def http_cpu_s(self) -> float | None:
        """CPU time of the event loop's thread, the process's first; None where the system does not
        say (it is Linux that does)."""
        times = Path(f"/proc/{self.pid}/task/{self.pid}/schedstat")
        return int(times.read_text().split()[0]) / 1e9 if times.exists() else None


@contextmanager
def started(
    arguments: list[str], *, timeout_s: float, api_key: str | None = None
) -> Iterator[ServerProcess]:
    """`draftsmith serve ARGUMENTS` on a free port, stopped afterwards."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    with tempfile.TemporaryDirectory() as folder, open(Path(folder) / "log", "wb+") as log:
        command = [sys.executable, "-m", "draftsmith.cli", "serve", *arguments, "--port", str(port)]
        process = subprocess.Popen(command, stdout=log, stderr=log, env=with_key(api_key))
        try:
            url = f"http://127.0.0.1:{port}"
            _wait(process, url, Path(folder) / "log", timeout_s)
            yield ServerProcess(url, process.pid)
        finally:
            process.terminate()
            try:
                process.wait(timeout=60)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()


def _wait(process: subprocess.Popen, url: str, log: Path, timeout_s: float) -> None:
    deadline_s = time.monotonic() + timeout_s
    while time.monotonic() < deadline_s:
        if process.poll() is not None:
            said = log.read_text(encoding="utf-8", errors="replace").strip() or "nothing"
            last = said.split("\n")[-1]
            raise UserError(f"the server did not start: {last.removeprefix('draftsmith: error: ')}")
        try:
            if httpx.get(f"{url}/health", timeout=5).status_code == 200:
                return
        except httpx.HTTPError:
            pass
        time.sleep(0.2)
    raise UserError(
        f"the server did not start within {timeout_s:g} s; raise timeout_s or use a smaller target"
    )
