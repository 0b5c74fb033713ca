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

import httpx

from draftsmith.client import with_key
from draftsmith.errors import UserError


@contextmanager
def started(arguments: list[str], *, timeout_s: float, api_key: str | None = None) -> Iterator[str]:
    """URL of `draftsmith serve ARGUMENTS` on a free port, stopped afterwards."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    with tempfile.TemporaryDirectory() as folder, open(Path(folder) / "log", "wb+") as log:
        command = [sys.executable, "-m", "draftsmith.cli", "serve", *arguments, "--port", str(port)]
        process = subprocess.Popen(command, stdout=log, stderr=log, env=with_key(api_key))
        try:
            url = f"http://127.0.0.1:{port}"
            _wait(process, url, Path(folder) / "log", timeout_s)
            yield url
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
