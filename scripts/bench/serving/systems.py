"""A server with OpenAI's API that takes turns with others in scripts/bench_serving."""

from __future__ import annotations

import asyncio
import os
import re
import signal
import statistics
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, NamedTuple, Protocol

import httpx

from draftsmith.serve.bench.client import Client, PassResult

TIMEOUT_S = 600.0
COUNTED = ("drafts", "accepted_tokens")


class Workload(NamedTuple):
    prompts: list[dict[str, Any]]
    max_tokens: int
    temperature: float
    streams: int


class Pass(NamedTuple):
    num_tokens: int
    wall_s: float
    drafts: float  # rounds that drafted, and draft tokens accepted in them
    accepted: float
    first_token_s: float  # median over the requests


class System(Protocol):
    name: str
    biased_when_sampled: bool

    def run(self, work: Workload) -> Pass: ...


@dataclass
class Served:
    """Drafts are counted by the counters that vLLM and ours share."""

    name: str
    url: str
    extra: dict[str, Any] = field(default_factory=dict)
    biased_when_sampled: bool = False
    # its process group, if it does not leave the cores alone while it has nothing to do
    group: int | None = None

    def run(self, work: Workload) -> Pass:
        with awake(self.group):
            # Without seeds: `--k auto` does not learn by requests that have one.
            before = self.counters()
            result = asyncio.run(self._measure(work))
            drafts, accepted = (
                after - earlier for after, earlier in zip(self.counters(), before, strict=True)
            )
        first_s = statistics.median(answer.ttft_s for answer in result.answers)
        return Pass(result.num_tokens, result.wall_s, drafts, accepted, first_s)

    async def _measure(self, work: Workload) -> PassResult:
        client = Client(self.url, api_key=None, timeout_s=TIMEOUT_S)
        body = {
            "max_tokens": work.max_tokens,
            "temperature": work.temperature,
            "ignore_eos": True,
            "model": await client.model(),
            **self.extra,
        }
        try:
            return await client.measure(work.prompts, body, work.streams)
        finally:
            await client.http.aclose()

    def counters(self) -> tuple[float, ...]:
        """Drafts and draft tokens accepted since the server started."""
        text = httpx.get(f"{self.url}/metrics").text
        return tuple(total(text, f"vllm:spec_decode_num_{name}_total") for name in COUNTED)


@contextmanager
def awake(group: int | None) -> Iterator[None]:
    """A stopped process group runs for as long as this lasts."""
    if group is None:
        yield
        return
    os.killpg(group, signal.SIGCONT)
    try:
        yield
    finally:
        os.killpg(group, signal.SIGSTOP)


def total(metrics: str, name: str) -> float:
    return sum(
        float(value) for value in re.findall(rf"^{name}(?:\{{.*\}})? (\S+)$", metrics, re.MULTILINE)
    )
