"""Systems that take turns in scripts/bench_serving: a server with OpenAI's API, or transformers'
generate in a process of its own."""

from __future__ import annotations

import asyncio
import json
import os
import re
import signal
import statistics
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, NamedTuple, Protocol

import httpx

from draftsmith.kernels.acceptance import DraftCost
from draftsmith.serve.bench.client import Client, PassResult
from draftsmith.serve.bench.report import cost_of

TIMEOUT_S = 600.0
COUNTED = ("drafts", "draft_tokens", "accepted_tokens")


@dataclass(frozen=True)
class Load:
    prompts: list[dict[str, Any]]  # enough for the most streams
    max_tokens: int
    k: int
    one_stream: int  # of the prompts, sent where there is one stream

    def of(self, streams: int) -> list[dict[str, Any]]:
        """Prompts of a pass. Drafts make answers of one length end at different times: with fewer
        than four a stream, the last ones alone would be timed."""
        return self.prompts[: max(self.one_stream, 4 * streams if streams > 1 else 1)]


class Workload(NamedTuple):
    temperature: float
    streams: int
    repeat: int


class Pass(NamedTuple):
    num_tokens: int
    wall_s: float
    drafts: float = 0.0  # rounds that drafted, and draft tokens offered and accepted in them
    offered: float = 0.0
    accepted: float = 0.0
    first_token_s: float | None = None  # median over the requests; None where nothing is streamed


class System(Protocol):
    name: str
    biased_when_sampled: bool

    def run(self, load: Load, work: Workload) -> Pass | None:
        """None where the system does not do this."""
        ...

    def draft_cost(self) -> DraftCost | None:
        """Bytes that drafting reads, in those of a target pass; None where it does not say them."""
        ...


@dataclass
class Served:
    """A server with OpenAI's API; drafts are counted by the counters that vLLM and ours share."""

    name: str
    url: str
    extra: dict[str, Any] = field(default_factory=dict)
    biased_when_sampled: bool = False
    # its process group, if it does not leave the cores alone while it has nothing to do
    group: int | None = None

    def run(self, load: Load, work: Workload) -> Pass:
        with awake(self.group):
            return self._pass(load, work)

    def _pass(self, load: Load, work: Workload) -> Pass:
        body = {
            "max_tokens": load.max_tokens,
            "temperature": work.temperature,
            "ignore_eos": True,
            **self.extra,
        }
        # Without seeds: `--k auto` does not learn by requests that have one.
        before = self.counters()
        result = asyncio.run(self._measure(load, body, work.streams))
        counted = (after - earlier for after, earlier in zip(self.counters(), before, strict=True))
        drafts, offered, accepted = counted
        first_s = statistics.median(answer.ttft_s for answer in result.answers)
        return Pass(result.num_tokens, result.wall_s, drafts, offered, accepted, first_s)

    async def _measure(self, load: Load, body: dict[str, Any], streams: int) -> PassResult:
        client = Client(self.url, api_key=None, timeout_s=TIMEOUT_S)
        try:
            return await client.measure(
                load.of(streams), body | {"model": await client.model()}, streams
            )
        finally:
            await client.http.aclose()

    def counters(self) -> tuple[float, ...]:
        """Drafts, draft tokens offered and draft tokens accepted since the server started."""
        text = httpx.get(f"{self.url}/metrics").text
        return tuple(total(text, f"vllm:spec_decode_num_{name}_total") for name in COUNTED)

    def draft_cost(self) -> DraftCost | None:
        with awake(self.group):
            return asyncio.run(self._draft_cost())

    async def _draft_cost(self) -> DraftCost | None:
        client = Client(self.url, api_key=None, timeout_s=TIMEOUT_S)
        try:
            return cost_of(await client.step_bytes())
        finally:
            await client.http.aclose()


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


@dataclass
class Generate:
    """transformers' generate in a process of its own."""

    name: str
    mode: str
    worker: subprocess.Popen
    biased_when_sampled: bool = False

    def run(self, load: Load, work: Workload) -> Pass | None:
        if self.mode != "plain" and work.streams > 1:
            return None  # one request at a time is all it can
        job = {
            "mode": self.mode, "prompts": [prompt["prompt"] for prompt in load.of(work.streams)],
            "temperature": work.temperature,
            "max_tokens": load.max_tokens, "streams": work.streams, "k": load.k,
            "seed": work.repeat,
        }  # fmt: skip
        found = ask(self.worker, job)
        return Pass(found["num_tokens"], found["wall_s"])

    def draft_cost(self) -> DraftCost | None:
        return None


def ask(worker: subprocess.Popen, job: dict[str, Any] | None) -> dict[str, Any]:
    assert worker.stdin is not None and worker.stdout is not None
    if job is not None:
        worker.stdin.write(json.dumps(job) + "\n")
        worker.stdin.flush()
    line = worker.stdout.readline()
    if not line:
        sys.exit("bench_serving: transformers' process ended; its message is above")
    return json.loads(line)
