"""Many clients that cancel, stop and ask for all lengths: nothing leaks, every answer ends, greedy
ones are a quiet server's."""

from __future__ import annotations

import asyncio
import gc
import random
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import httpx
import pytest

from draftsmith.drafters.heads.eagle3 import Eagle3
from draftsmith.drafters.options import Eagle3Options
from draftsmith.drafters.target.target import Target
from draftsmith.drafters.text.ngram import Ngram
from draftsmith.serve.config import EngineConfig
from draftsmith.serve.engine.build import build_engine
from draftsmith.serve.sampling.params import SamplingParams

SHARED = [20 + i * 7 % 90 for i in range(40)]
PROMPTS = [
    SHARED[:cut] + [100 + index] * (index % 3) for index, cut in enumerate((40, 33, 32, 20, 9, 1))
]
MOST = 72


@pytest.fixture(scope="module")
def target(tiny_target: Callable[..., str]) -> Target:
    return Target.load(tiny_target("llama"))


@pytest.fixture(scope="module")
def quiet(target: Target) -> list[list[int]]:
    params = SamplingParams(temperature=0.0, max_tokens=MOST, ignore_eos=True)
    return [
        completion.tokens
        for completion in build_engine(
            target, None, EngineConfig(max_batch=1, compile="off")
        ).generate(PROMPTS, params)
    ]


class Crowd:
    """Clients of one server until `seconds` have passed."""

    def __init__(self, server: Any, quiet: list[list[int]], *, num_clients: int, seconds: float):
        self.server, self.quiet, self.num_clients, self.seconds = (
            server,
            quiet,
            num_clients,
            seconds,
        )
        self.ends: Counter[str] = Counter()
        self.memory_bytes: list[int] = []

    def run(self) -> None:
        asyncio.run(self._all())

    async def _all(self) -> None:
        until_s = time.monotonic() + self.seconds
        limits = httpx.Limits(max_connections=self.num_clients)
        async with httpx.AsyncClient(base_url=self.server.url, timeout=120, limits=limits) as http:
            await asyncio.gather(
                *(
                    self._client(http, random.Random(seed), until_s)
                    for seed in range(self.num_clients)
                )
            )

    async def _client(self, http: httpx.AsyncClient, chance: random.Random, until_s: float) -> None:
        while time.monotonic() < until_s:
            index, length = chance.randrange(len(PROMPTS)), chance.randint(1, MOST)
            body = {
                "model": "tiny",
                "prompt": PROMPTS[index],
                "max_tokens": length,
                "ignore_eos": True,
                "temperature": chance.choice([0, 0, 1.0]),
                "stream": True,
                "return_token_ids": True,
                "request_class": chance.choice(["", "a", "b"]),
            }
            if chance.random() < 0.3:
                body["speculation"] = {"k": chance.randint(0, 5)}
            if chance.random() < 0.2:
                body["stop_token_ids"] = [self.quiet[index][length // 2]]
            await self._ask(
                http,
                body,
                index,
                leave_after=chance.randint(0, 4) if chance.random() < 0.3 else None,
            )
            self.memory_bytes.append(resident_bytes())

    async def _ask(
        self, http: httpx.AsyncClient, body: dict[str, Any], index: int, *, leave_after: int | None
    ) -> None:
        tokens: list[int] = []
        async with http.stream("POST", "/v1/completions", json=body) as response:
            assert response.status_code == 200
            pieces = 0
            async for line in response.aiter_lines():
                pieces += 1
                if leave_after is not None and pieces > leave_after:
                    self.ends["left"] += 1
                    return
                if line == "data: [DONE]":
                    self.ends["complete"] += 1
                elif line.startswith("data: {"):
                    (choice,) = httpx.Response(200, content=line[6:]).json()["choices"]
                    tokens += choice["token_ids"]
        right = self.quiet[index][: body["max_tokens"]]
        for stop in body.get("stop_token_ids", ()):
            right = right[: right.index(stop) + 1] if stop in right else right
        assert len(tokens) <= body["max_tokens"]
        if body["temperature"] == 0:
            assert tokens == right
            self.ends["greedy"] += 1


def resident_bytes() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * 4096


def check_quiet(server: Any) -> None:
    """Nobody is served any more, and everything that was taken is back."""
    scheduler = server.engine.scheduler
    for _ in range(500):
        if not scheduler.busy:
            break
        time.sleep(0.02)
    assert not scheduler.busy and len(scheduler.waiting) == 0
    assert scheduler.blocks.num_free == scheduler.blocks.num_usable
    assert sorted(scheduler._slots) == list(range(scheduler.max_batch))
    assert server.loop.healthy and not server.engine.stats.fallbacks


def crowd(
    live_server: Callable,
    target: Target,
    quiet: list[list[int]],
    *,
    num_clients: int,
    seconds: float,
) -> Crowd:
    # Few blocks, so that requests are preempted again and again.
    head = Eagle3.create(Eagle3Options(), target, seed=1).eval()
    config = EngineConfig(
        k=8,
        adaptive=True,
        max_batch=16,
        block_size=8,
        num_blocks=30,
        max_length=128,
        max_round_tokens=64,
    )
    server = live_server(target, head, config)
    crowd = Crowd(server, quiet, num_clients=num_clients, seconds=seconds)
    crowd.run()
    check_quiet(server)
    assert server.engine.scheduler.num_preemptions > 0 and server.engine.stats.prefix_cache_hits > 0
    return crowd


@pytest.mark.long
def test_a_crowd_leaves_nothing_behind(
    live_server: Callable, target: Target, quiet: list[list[int]]
) -> None:
    found = crowd(live_server, target, quiet, num_clients=24, seconds=6.0)
    assert min(found.ends[end] for end in ("complete", "left", "greedy")) > 5
    server = live_server(
        target,
        Ngram(min_n=1),
        EngineConfig(k=3, max_batch=4, num_blocks=40, block_size=4, max_length=128),
    )
    Crowd(server, quiet, num_clients=8, seconds=2.0).run()
    check_quiet(server)


@pytest.mark.long
@pytest.mark.timeout(900)
def test_ten_minutes_of_64_clients(
    live_server: Callable, target: Target, quiet: list[list[int]]
) -> None:
    found = crowd(live_server, target, quiet, num_clients=64, seconds=600.0)
    gc.collect()
    assert min(found.ends[end] for end in ("complete", "left", "greedy")) > 200
    # Flat after the first minutes: latency lists, compiled shapes and caches have found their size
    # by then.
    third = len(found.memory_bytes) // 3
    middle, last = (
        sorted(found.memory_bytes[third : 2 * third]),
        sorted(found.memory_bytes[2 * third :]),
    )
    assert last[len(last) // 2] < 1.05 * middle[len(middle) // 2]
