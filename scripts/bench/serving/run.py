"""The comparison behind scripts/bench_serving: systems that are all up at once take turns over the
same prompts."""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import re
import signal
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple, Protocol

import httpx
import torch
import transformers

from draftsmith.files import write_json
from draftsmith.progress import Progress
from draftsmith.serve.bench.client import Client
from draftsmith.serve.bench.prompts import read_prompts
from draftsmith.serve.bench.server import started
from scripts.bench.serving.report import table
from scripts.demo.traffic import write_bench_prompts
from scripts.paths import ROOT

TIMEOUT_S = 600.0
AGAIN = "no draft, again"  # the same server twice: how far two processes that do the same differ


@dataclass(frozen=True)
class Load:
    prompts: list[dict[str, Any]]
    max_tokens: int
    k: int


class Workload(NamedTuple):
    temperature: float
    streams: int
    repeat: int


class Pass(NamedTuple):
    num_tokens: int
    wall_s: float
    drafts: float = 0.0  # rounds that drafted, and draft tokens accepted in them
    accepted: float = 0.0


class System(Protocol):
    name: str
    biased_when_sampled: bool

    def run(self, load: Load, work: Workload) -> Pass | None:
        """None where the system does not do this."""
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
        drafts, accepted = (after - earlier for after, earlier in zip(self.counters(), before))
        return Pass(result.num_tokens, result.wall_s, drafts, accepted)

    async def _measure(self, load: Load, body: dict[str, Any], streams: int):
        client = Client(self.url, api_key=None, timeout_s=TIMEOUT_S)
        try:
            return await client.measure(
                load.prompts, body | {"model": await client.model()}, streams
            )
        finally:
            await client.http.aclose()

    def counters(self) -> tuple[float, float]:
        text = httpx.get(f"{self.url}/metrics").text
        return total(text, "vllm:spec_decode_num_drafts_total"), total(
            text, "vllm:spec_decode_num_accepted_tokens_total"
        )


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
            "mode": self.mode, "prompts": [prompt["prompt"] for prompt in load.prompts],
            "temperature": work.temperature,
            "max_tokens": load.max_tokens, "streams": work.streams, "k": load.k,
            "seed": work.repeat,
        }  # fmt: skip
        found = ask(self.worker, job)
        return Pass(found["num_tokens"], found["wall_s"])


def ask(worker: subprocess.Popen, job: dict[str, Any] | None) -> dict[str, Any]:
    assert worker.stdin is not None and worker.stdout is not None
    if job is not None:
        worker.stdin.write(json.dumps(job) + "\n")
        worker.stdin.flush()
    line = worker.stdout.readline()
    if not line:
        sys.exit("bench_serving: transformers' process ended; its message is above")
    return json.loads(line)


@contextmanager
def generator(target: Path, draft: Path) -> Iterator[subprocess.Popen]:
    script = [
        sys.executable,
        "-m",
        "scripts.bench.serving.transformers_peer",
        "--target",
        target,
        "--draft",
        draft,
    ]
    with subprocess.Popen(
        [str(word) for word in script],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        cwd=ROOT,
    ) as worker:
        ask(worker, None)
        yield worker
        worker.kill()


@contextmanager
def vllm_server(
    python: str, target: Path, speculative: dict[str, Any] | None
) -> Iterator[tuple[str, int]]:
    """vLLM's server as its users start it, compiled; its URL and process group, which is stopped
    once it is up: idle vLLM workers were seen to take a quarter of a core each."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    command = [
        python,
        "-m",
        "vllm.entrypoints.openai.api_server",
        "--model",
        str(target),
        "--port",
        str(port),
    ]
    command += ["--dtype", "float32", "--no-enable-log-requests"]
    if speculative is not None:
        command += ["--speculative-config", json.dumps(speculative)]
    environment = os.environ | {
        "VLLM_CPU_KVCACHE_SPACE": "1",
        "VLLM_NO_USAGE_STATS": "1",
        "HF_HUB_OFFLINE": "1",
    }
    with tempfile.NamedTemporaryFile("w+", suffix=".log") as log, subprocess.Popen(
        command, stdout=log, stderr=log, env=environment, start_new_session=True
    ) as server:  # fmt: skip
        try:
            url = f"http://127.0.0.1:{port}"
            wait(url, server, Path(log.name))
            os.killpg(server.pid, signal.SIGSTOP)
            yield url, server.pid
        finally:
            os.killpg(server.pid, signal.SIGKILL)


def wait(url: str, server: subprocess.Popen, log: Path) -> None:
    deadline_s = time.monotonic() + TIMEOUT_S
    while time.monotonic() < deadline_s and server.poll() is None:
        try:
            if httpx.get(f"{url}/health", timeout=5).status_code == 200:
                return
        except httpx.HTTPError:
            pass
        time.sleep(0.5)
    sys.exit(
        "bench_serving: vLLM did not start; the end of its "
        f"log:\n{log.read_text(errors='replace')[-3000:]}"
    )


def our_servers(run: Path, k: int) -> Iterator[tuple[list[str], dict[str, dict[str, Any]]]]:
    """Options of each server, and its rows: what their requests ask for besides."""
    fixed = {f", k = {count}": {"speculation": {"k": count}} for count in range(1, k)}
    idle = {" loaded, off": {"speculation": {"k": 0}}}
    chosen, auto = ["--k", str(k)], ["--k", "auto"]
    yield chosen, {"no draft": {}}
    yield chosen, {AGAIN: {}}
    yield [*chosen, "--ngram"], {"n-gram": {}}
    yield [*chosen, "--suffix"], {"suffix": {}}
    for name in ("eagle3", "draft-lm"):
        draft = ["--draft", str(run / name)]
        yield (
            [*chosen, *draft],
            {name + what: extra for what, extra in {"": {}, **fixed, **idle}.items()},
        )
        yield [*auto, *draft], {f"{name}, k auto": {}}


def our_systems(stack: ExitStack, run: Path, k: int, wanted: re.Pattern[str]) -> Iterator[System]:
    for options, rows in our_servers(run, k):
        chosen = {
            f"draftsmith, {name}": extra
            for name, extra in rows.items()
            if wanted.search(f"draftsmith, {name}")
        }
        if chosen:
            url = stack.enter_context(
                started(["--target", str(run / "target"), *options], timeout_s=TIMEOUT_S)
            )
            yield from (Served(name, url, extra=extra) for name, extra in chosen.items())


def transformers_systems(stack: ExitStack, run: Path, wanted: re.Pattern[str]) -> Iterator[System]:
    modes = {
        "transformers": "plain",
        "transformers, assisted by draft-lm": "assisted",
        "transformers, prompt lookup": "lookup",
    }
    chosen = {name: mode for name, mode in modes.items() if wanted.search(name)}
    if chosen:
        worker = stack.enter_context(generator(run / "target", run / "export" / "draft-lm"))
        yield from (Generate(name, mode, worker) for name, mode in chosen.items())


def vllm_systems(
    stack: ExitStack, python: str, run: Path, k: int, wanted: re.Pattern[str]
) -> Iterator[System]:
    eagle3, draft_lm = str(run / "export" / "eagle3"), str(run / "export" / "draft-lm")
    for name, speculative in (
        ("no draft", None),
        ("n-gram", {"method": "ngram", "prompt_lookup_min": 2, "prompt_lookup_max": 4}),
        ("eagle3", {"method": "eagle3", "model": eagle3}),
        ("draft-lm", {"method": "draft_model", "model": draft_lm}),
    ):
        if not wanted.search(f"vllm-cpu, {name}"):
            continue
        options = None if speculative is None else speculative | {"num_speculative_tokens": k}
        url, group = stack.enter_context(vllm_server(python, run / "target", options))
        # What vllm-cpu 0.32 samples while it speculates is biased.
        yield Served(
            f"vllm-cpu, {name}", url, biased_when_sampled=speculative is not None, group=group
        )


def measure(
    systems: Sequence[System], load: Load, works: Sequence[tuple[float, int]], repeats: int
) -> list[dict[str, Any]]:
    """Every system once a turn, every other turn backwards, so that a drift of the machine favours
    none."""
    passes: dict[tuple[str, float, int], list[Pass]] = {}
    progress = Progress(
        "bench_serving", total=len(works) * repeats * len(systems), unit="passes", stream=sys.stderr
    )
    warm = Load(load.prompts[:1], 8, load.k)
    done = 0
    for temperature, streams in works:
        for system in systems:
            system.run(warm, Workload(temperature, streams, 0))
        for repeat in range(repeats):
            for system in systems if repeat % 2 == 0 else reversed(systems):
                found = system.run(load, Workload(temperature, streams, repeat))
                done += 1
                if found is not None:
                    passes.setdefault((system.name, temperature, streams), []).append(found)
                    progress.update(done, f"{system.name}, T = {temperature:g}, {streams} at once")
    progress.close()
    biased = {system.name for system in systems if system.biased_when_sampled}
    return [
        figures(name, temperature, streams, found, biased)
        for (name, temperature, streams), found in passes.items()
    ]


def figures(
    name: str, temperature: float, streams: int, passes: list[Pass], biased: set[str]
) -> dict[str, Any]:
    speeds = [one.num_tokens / one.wall_s for one in passes]
    drafts, accepted = sum(one.drafts for one in passes), sum(one.accepted for one in passes)
    return {
        "system": name, "temperature": temperature, "streams": streams,
        "tokens_per_s": statistics.median(speeds),
        "lowest": min(speeds), "highest": max(speeds), "passes": speeds,
        "tau": 1 + accepted / drafts if drafts else None,
        "biased": temperature > 0 and name in biased,
    }  # fmt: skip


def options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="scripts/bench_serving", description="Serving speed beside transformers and vLLM."
    )
    parser.add_argument(
        "--run",
        type=Path,
        default=ROOT / "runs" / "quickstart",
        help="a finished quickstart folder",
    )
    parser.add_argument("--out", type=Path, help="write the figures here as JSON")
    parser.add_argument("--k", type=int, default=3, help="draft tokens a round, for all systems")
    # Drafts make answers of one length end at different times: with few requests a stream, the last
    # ones alone would be timed.
    parser.add_argument("--prompts", type=int, default=32)
    parser.add_argument("--max-tokens", type=int, default=96)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--temperature", type=float, nargs="+", default=[0.0, 1.0])
    parser.add_argument("--streams", type=int, nargs="+", default=[1, 8])
    parser.add_argument(
        "--only",
        type=re.compile,
        default="",
        help="regular expression: measure the systems whose name matches",
    )
    parser.add_argument(
        "--quick", action="store_true", help="2 prompts of 16 tokens, once, 1 and 2 at a time"
    )
    found = parser.parse_args()
    if found.quick:
        found.prompts, found.max_tokens, found.repeats, found.streams = 2, 16, 1, [1, 2]
    if max(found.streams) > found.prompts:
        parser.error(
            f"{found.prompts} prompts cannot keep {max(found.streams)} streams busy; give as many "
            "prompts at least"
        )
    return found


def main() -> None:
    chosen = options()
    if not (chosen.run / "export" / "draft-lm").exists():
        print("bench_serving: no drafts yet, running scripts/quickstart", flush=True)
        subprocess.run([ROOT / "scripts" / "quickstart"], check=True)
    with tempfile.TemporaryDirectory() as folder:
        write_bench_prompts(chosen.run / "target", Path(folder) / "prompts.jsonl", chosen.prompts)
        prompts = read_prompts(f"{folder}/prompts.jsonl", count=chosen.prompts, chars=400, seed=0)
    python = os.environ.get("DRAFTSMITH_VLLM_PYTHON")
    with ExitStack() as stack:
        systems: list[System] = list(transformers_systems(stack, chosen.run, chosen.only))
        if python:
            print("bench_serving: starting vLLM, about a minute each time", flush=True)
            systems += vllm_systems(stack, python, chosen.run, chosen.k, chosen.only)
        systems += our_systems(stack, chosen.run, chosen.k, chosen.only)
        if not systems:
            sys.exit(
                f"bench_serving: --only {chosen.only.pattern!r} matches no system; give a part of "
                "a name, such as 'k auto'"
            )
        works = [
            (temperature, streams)
            for temperature in chosen.temperature
            for streams in chosen.streams
        ]
        rows = measure(systems, Load(prompts, chosen.max_tokens, chosen.k), works, chosen.repeats)
    print(table(rows))
    if not python:
        print("vLLM was not measured: DRAFTSMITH_VLLM_PYTHON is not set")
    if chosen.out is not None:
        versions = {
            "torch": torch.__version__,
            "transformers": transformers.__version__,
            "cores": os.cpu_count(),
        }
        setting = {
            name: value for name, value in vars(chosen).items() if name not in ("run", "out")
        }
        setting["only"] = chosen.only.pattern
        write_json(
            chosen.out, {"schema": 1, "setting": setting, "versions": versions, "rows": rows}
        )


if __name__ == "__main__":
    main()
