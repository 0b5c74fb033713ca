"""No request ends the server, whatever it holds: made-up bodies against a process of its own."""

from __future__ import annotations

import http.client
import itertools
import json
import shutil
import subprocess
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from tests.forked import Forked, cli, free_port
from tests.made_up import MadeUp
from tests.waiting import wait_for

STATUSES = {200, 400, 404, 413}
PATIENCE_S = 120  # of a busy machine; grammars are given up after two seconds of work
NUM_CLIENTS = 24


class Client:
    """One connection, made anew where the server closed it."""

    def __init__(self, port: int):
        self.connection = http.client.HTTPConnection("127.0.0.1", port, timeout=PATIENCE_S)

    def fault(self, seed: int) -> str:
        """What is wrong with the answer to the body of a seed; "" for nothing."""
        path, body = MadeUp(seed).request()
        begun_s = time.monotonic()
        try:
            self.connection.request("POST", path, body, {"content-type": "application/json"})
            response = self.connection.getresponse()
            answer = response.read().decode()
        except Exception as error:
            self.connection.close()
            return f"{path}: {type(error).__name__} after {time.monotonic() - begun_s:.1f} s"
        if response.status not in STATUSES:
            return f"{path}: {response.status} {answer[:300]}"
        if response.status == 200:
            return "" if answer.endswith(("}", "data: [DONE]\n\n", "}\n\n")) else f"{path}: cut"
        error = json.loads(answer)["error"]
        told = error["message"]
        return "" if set(error) == {"message", "type", "param", "code"} and told else answer


def faults(port: int, seeds: Iterator[int]) -> dict[int, str]:
    """Of the answers to the bodies of `seeds`, by seed."""
    found: dict[int, str] = {}
    lock = threading.Lock()

    def ask(_: int) -> None:
        client = Client(port)
        while len(found) < 20:
            with lock:
                seed = next(seeds, None)
            if seed is None:
                return
            if fault := client.fault(seed):
                found[seed] = fault
                print(f"seed {seed}: {fault}", flush=True)

    with ThreadPoolExecutor(NUM_CLIENTS) as clients:
        list(clients.map(ask, range(NUM_CLIENTS)))
    return found


@pytest.fixture(scope="module")
def server(
    target_folder: str, tool_template: str, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[tuple[Forked, int]]:
    folder, port = tmp_path_factory.mktemp("target"), free_port()
    shutil.copytree(target_folder, folder, dirs_exist_ok=True)
    (Path(folder) / "chat_template.jinja").write_text(tool_template)
    flags = ("--suffix", "--port", port, "--max-batch", "32", "--no-warm-up")
    process = Forked(cli("serve", "--target", folder, *flags), stderr=subprocess.PIPE)
    url = f"http://127.0.0.1:{port}/health"
    wait_for(url, process, process.stderr.read, timeout_s=PATIENCE_S)
    yield process, port
    process.terminate()
    assert process.wait(PATIENCE_S) == 0


@pytest.mark.parametrize(
    ("first", "count"),
    [(0, 150), pytest.param(1_000, 100_000, marks=[pytest.mark.long, pytest.mark.timeout(1800)])],
)
def test_no_body_ends_the_server(first: int, count: int, server: tuple[Forked, int]) -> None:
    process, port = server
    begun_s = time.monotonic()
    found = faults(port, itertools.islice(itertools.count(first), count))
    print(f"{count} bodies in {time.monotonic() - begun_s:.0f} s")
    assert process.poll() is None, f"the server ended with {process.returncode}"
    assert not found, f"seeds of tests/made_up.py: {found}"
    assert "Traceback" not in process.stderr.read()
