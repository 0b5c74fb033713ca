"""Five minutes of 64 clients against a server process whose draft is replaced again and again:
nothing leaks, nothing is lost. What is answered meanwhile is compared in
`tests/integration/test_served_text.py`.

DRAFTSMITH_LOAD_MINUTES sets another length.
"""

from __future__ import annotations

import asyncio
import os
import random
import threading
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import httpx
import pytest
import torch
from safetensors.torch import load_file, save_file

from draftsmith.drafters import checkpoint, versions
from draftsmith.drafters.heads.eagle3 import Eagle3
from draftsmith.drafters.options import Eagle3Options
from draftsmith.drafters.target.target import Target
from tests.waiting import wait_until

MINUTES = float(os.environ.get("DRAFTSMITH_LOAD_MINUTES", "5"))
LEAST = 10 * MINUTES  # of everything that must have happened
NUM_CLIENTS = 64
PROMPTS = ["def draft(self, tokens):\n    return " + tail for tail in ("", "[", "None")] + ["x"]
# that take turns; each time round, the last one is published with a NaN, which a server must refuse
DRAFTS = 4
pytestmark = [pytest.mark.long, pytest.mark.timeout(60 * MINUTES + 600)]


class Repeated:
    """Calls something every so many seconds within a block."""

    def __init__(self, call: Callable[[], None], every_s: float):
        self._call, self._every_s, self._stopping = call, every_s, threading.Event()
        self._thread = threading.Thread(target=self._run)

    def __enter__(self) -> None:
        self._thread.start()

    def __exit__(self, *ignored: object) -> None:
        self._stopping.set()
        self._thread.join()

    def _run(self) -> None:
        while not self._stopping.wait(self._every_s):
            self._call()


class Publisher:
    """Publishes drafts in turn, one of them broken."""

    def __init__(self, root: Path, target: Target, drafts: list[Eagle3]):
        self.root, self.target, self.drafts = root, target, drafts
        self.num_published = 0

    def publish(self) -> None:
        of = {"family": "eagle3", "target": checkpoint.identity(self.target)}
        versions.publish(self.root, self._save, **of, parent=None, data_range={}, gate={})
        self.num_published += 1

    def _save(self, folder: Path) -> None:
        number = self.num_published % len(self.drafts)
        checkpoint.save(self.drafts[number], folder, self.target)
        if number == len(self.drafts) - 1:
            weights = load_file(folder / "model.safetensors")
            weights["fc.weight"][0, 0] = torch.nan
            save_file(weights, folder / "model.safetensors")


class MemoryLog:
    """Resident memory of a process at each look."""

    def __init__(self, pid: int):
        self.pid = pid
        self.resident_bytes: list[int] = []

    def look(self) -> None:
        pages = int(Path(f"/proc/{self.pid}/statm").read_text().split()[1])
        self.resident_bytes.append(pages * os.sysconf("SC_PAGE_SIZE"))

    def growth(self) -> float:
        """Of a line through the second half, as a share of the memory there: what was still growing
        by then."""
        settled = torch.tensor(
            self.resident_bytes[len(self.resident_bytes) // 2 :], dtype=torch.float64
        )
        time_s = torch.arange(len(settled), dtype=torch.float64)
        slope = torch.cov(torch.stack([time_s, settled]))[0, 1] / time_s.var()
        return float(slope * len(settled) / settled.mean())


@pytest.fixture
def drafts(tiny_target: Callable[..., str]) -> tuple[Target, list[Eagle3]]:
    target = Target.load(tiny_target("llama"))
    return target, [
        Eagle3.create(Eagle3Options(), target, seed=seed).eval() for seed in range(DRAFTS)
    ]


async def ask(http: httpx.AsyncClient, chance: random.Random) -> str:
    """How one request ends: "complete" or "left"."""
    body = {
        "model": "tiny", "prompt": chance.choice(PROMPTS), "max_tokens": chance.randint(1, 48),
        "temperature": chance.choice([0, 0.7, 1.0]), "n": chance.choice([1, 1, 2]), "stream": True,
        "ignore_eos": True, "request_class": chance.choice(["", "chat"]),
    }  # fmt: skip
    leave_after = chance.randint(0, 12) if chance.random() < 0.3 else None
    async with http.stream("POST", "/v1/completions", json=body) as response:
        assert response.status_code == 200
        events, last = 0, ""
        async for line in response.aiter_lines():
            if events == leave_after:
                return "left"
            events, last = events + bool(line), line or last
    assert last == "data: [DONE]"
    return "complete"


async def crowd(url: str) -> Counter[str]:
    ends: Counter[str] = Counter()
    until_s = time.monotonic() + 60 * MINUTES

    async def client(seed: int) -> None:
        chance = random.Random(seed)
        while time.monotonic() < until_s:
            ends[await ask(http, chance)] += 1

    limits = httpx.Limits(max_connections=2 * NUM_CLIENTS)
    async with httpx.AsyncClient(base_url=url, timeout=300, limits=limits) as http:
        await asyncio.gather(*map(client, range(NUM_CLIENTS)))
    return ends


def test_a_crowd_leaves_nothing_behind(
    start_server: Callable, drafts: tuple[Target, list[Eagle3]], tmp_path: Path
) -> None:
    publisher = Publisher(tmp_path / "versions", *drafts)
    publisher.publish()
    # Few blocks, so that requests are put back again and again.
    small = ["--max-batch", "16", "--block-size", "8", "--num-blocks", "40", "--max-length", "128"]
    followed = ["--versions", str(publisher.root), "--poll-s", "0.3", "--k", "auto"]
    server = start_server(*followed, *small)
    memory = MemoryLog(server.process.pid)
    with Repeated(publisher.publish, max(2.0, MINUTES)), Repeated(memory.look, 1.0):
        ends = asyncio.run(crowd(server.url))
    kinds = ("running", "waiting")
    wait_until(lambda: not any(server.metric(f"vllm:num_requests_{kind}") for kind in kinds), 120)
    resident = f"{memory.growth():+.2%} of {memory.resident_bytes[-1] >> 20} MiB"
    print(ends, f"{publisher.num_published} versions, memory {resident}")
    assert min(ends["complete"], ends["left"]) > LEAST
    check_counters(server, ends, publisher)
    assert memory.growth() < 0.03


def check_counters(server: Any, ends: Counter[str], publisher: Publisher) -> None:
    # Blocks that the prefix cache keeps have no owner and count as free.
    assert server.metric("vllm:kv_cache_usage_perc") == 0
    for name in ("num_preemptions", "prefix_cache_hits", "spec_decode_num_draft_tokens"):
        assert server.metric(f"vllm:{name}_total") > LEAST, name
    # Whoever left before the server had read the request was never admitted.
    ended = server.labelled("vllm:request_success_total", "finished_reason")
    assert ended["error"] == 0 and sum(ended.values()) <= 2 * ends.total()
    assert ended["length"] >= ends["complete"] and ended["abort"] > 0
    assert publisher.num_published > len(publisher.drafts)
    broken = publisher.num_published // len(publisher.drafts)
    assert server.metric("draftsmith_swaps_refused_total") >= broken - 1
    assert 0 < server.metric("draftsmith_swaps_total") <= publisher.num_published - broken
    assert server.metric("draftsmith_fallbacks_total") == 0
    assert httpx.get(f"{server.url}/health").status_code == 200
    assert httpx.get(f"{server.url}/load").json() == {"server_load": 0}
    log = server.log.read_text()
    assert "a round failed" not in log and "Traceback" not in log, log[-4000:]
