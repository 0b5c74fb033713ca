"""The proxy as a process of its own."""

from __future__ import annotations

import signal
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import httpx

from draftsmith.client import parse
from draftsmith.distill.buffer.buffer import BufferReader
from tests.forked import Forked, free_port
from tests.unit.fleet.observe.conftest import VllmLike


def test_it_shows_its_counts_and_a_signal_ends_it_with_its_records_written(
    served: Callable[[Any], str], tmp_path: Path
) -> None:
    address, status = f"127.0.0.1:{free_port()}", free_port()
    options = ["--url", served(VllmLike()), "--buffer", str(tmp_path), "--listen", address]
    options += ["--status-port", str(status)]
    proxy = Forked([sys.executable, "-m", "draftsmith.cli", "observe", *options])
    body = {"model": "m", "prompt": [5, 6, 7], "max_tokens": 4, "return_token_ids": True}
    answer = asked(f"http://{address}/v1/completions", body, proxy)
    assert answer.status_code == 200
    found = parse(httpx.get(f"http://127.0.0.1:{status}/metrics").text)
    assert found.total("draftsmith_observed_requests_total") == 1
    proxy.send_signal(signal.SIGTERM)
    assert proxy.wait(60) == 0
    records = BufferReader(str(tmp_path)).read().records
    assert records and records[0].context[:3] == [5, 6, 7]


def asked(url: str, body: dict[str, Any], process: Forked) -> httpx.Response:
    """The answer, once the process listens."""
    deadline_s = time.monotonic() + 60
    while True:
        try:
            return httpx.post(url, json=body, timeout=30)
        except httpx.TransportError:
            assert process.poll() is None and time.monotonic() < deadline_s
            time.sleep(0.05)
