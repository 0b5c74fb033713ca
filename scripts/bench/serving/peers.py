"""The other systems of scripts/bench_serving: vLLM and llama.cpp, each started as its users start it."""

from __future__ import annotations

import json
import os
import re
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path

import httpx

from scripts.bench.serving.systems import TIMEOUT_S, Served, System

MENDED = "draftsmith.fleet.vllm.plugin"
VLLM_VARIABLES = {"VLLM_CPU_KVCACHE_SPACE": "1", "VLLM_NO_USAGE_STATS": "1", "HF_HUB_OFFLINE": "1"}
# Samplers that llama-server has on by default.
PLAIN_SAMPLING = {"top_k": 0, "top_p": 1.0, "min_p": 0.0}


@dataclass(frozen=True)
class Bench:
    """Comparison of one target in one dtype, its EAGLE-3 draft if any, and the systems asked for."""

    target: Path
    draft: Path | None
    exports: Path  # of the draft, a folder for each engine
    dtype: str
    k: int
    streams: int  # most at once
    wanted: re.Pattern[str]

    def wants(self, name: str) -> bool:
        is_possible = self.draft is not None or ", draft" not in name
        return is_possible and self.wanted.search(name) is not None

    def exported(self, engine: str, *options: str) -> Path:
        """Folder of the draft in an engine's layout, made once."""
        out = self.exports / engine
        if not out.exists():
            command = [sys.executable, "-m", "draftsmith.cli", "export", self.draft, "--to", engine]
            command += ["--target", self.target, "--out", out, *options]
            subprocess.run([str(word) for word in command], check=True)
        return out


def vllm_systems(stack: ExitStack, bench: Bench, python: str) -> Iterator[System]:
    print("bench_serving: starting vLLM, about a minute each time", flush=True)
    mended = mends(python)
    for name in ("no draft", "draft"):
        if not bench.wants(f"vllm-cpu, {name}"):
            continue
        options = [] if not mended else ["--additional-config", mended]
        if name == "draft":
            method = {"method": "eagle3", "num_speculative_tokens": bench.k}
            options += [
                "--speculative-config",
                json.dumps(method | {"model": str(bench.exported("vllm"))}),
            ]
        url, group = stack.enter_context(
            vllm_server(python, bench.target, options, dtype=bench.dtype)
        )
        # What vllm-cpu 0.32 samples while it speculates is biased, unless its kernel is mended.
        biased = name == "draft" and not mended
        yield Served(f"vllm-cpu, {name}", url, biased_when_sampled=biased, group=group)


def mends(python: str) -> str:
    """Configuration with which vLLM's sampled speculation is right: that of draftsmith's plugin
    where it is installed beside vLLM, else ""."""
    found = (
        "import importlib.util, importlib.metadata as m, sys;"
        "names = [e.name for e in m.entry_points(group='vllm.general_plugins')];"
        f"sys.exit('draftsmith' not in names or importlib.util.find_spec('{MENDED}') is None)"
    )
    done = subprocess.run([python, "-c", found], capture_output=True)
    return json.dumps({"draftsmith": {"mend_expand_kernel": True}}) if done.returncode == 0 else ""


@contextmanager
def vllm_server(
    python: str,
    target: Path,
    options: Sequence[str],
    *,
    dtype: str = "float32",
    variables: Mapping[str, str] | None = None,
) -> Iterator[tuple[str, int]]:
    """vLLM's server as its users start it, compiled; its URL and process group, which is stopped
    once it is up: idle vLLM workers were seen to take a quarter of a core each."""
    command = [python, "-m", "vllm.entrypoints.openai.api_server", "--model", str(target)]
    command += ["--dtype", dtype, "--no-enable-log-requests", *options]
    with server("vLLM", command, {**VLLM_VARIABLES, **(variables or {})}) as (url, group):
        os.killpg(group, signal.SIGSTOP)
        yield url, group


def llama_systems(stack: ExitStack, bench: Bench, program: str) -> Iterator[System]:
    """llama.cpp's server with target and draft as GGUF in the same dtype, with its own number of
    threads; both come of the draft's export."""
    eagle3 = ["--spec-type", "draft-eagle3", "--spec-draft-n-max", str(bench.k)]
    for name in ("no draft", "draft"):
        if not bench.wants(f"llama.cpp, {name}"):
            continue
        folder = bench.exported("gguf", "--with-target")
        drafting = [] if name == "no draft" else ["-md", str(folder / "draft.gguf"), *eagle3]
        command = [program, "-m", str(folder / "target.gguf"), "--offline"]
        command += ["--no-ui", "-np", str(bench.streams), "-c", str(1024 * bench.streams)]
        url, _ = stack.enter_context(server("llama.cpp", [*command, *drafting], {}))
        yield Served(f"llama.cpp, {name}", url, extra=PLAIN_SAMPLING)


@contextmanager
def server(what: str, command: list[str], environment: dict[str, str]) -> Iterator[tuple[str, int]]:
    """A server in a process group of its own, once it is up: its URL and the group."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    with tempfile.NamedTemporaryFile("w+", suffix=".log") as log, subprocess.Popen(
        [*command, "--port", str(port)], stdout=log, stderr=log,
        env=os.environ | environment, start_new_session=True,
    ) as process:  # fmt: skip
        try:
            url = f"http://127.0.0.1:{port}"
            wait(what, url, process, Path(log.name))
            yield url, process.pid
        finally:
            os.killpg(process.pid, signal.SIGKILL)


def wait(what: str, url: str, process: subprocess.Popen, log: Path) -> None:
    deadline_s = time.monotonic() + TIMEOUT_S
    while time.monotonic() < deadline_s and process.poll() is None:
        try:
            if httpx.get(f"{url}/health", timeout=5).status_code == 200:
                return
        except httpx.HTTPError:
            pass
        time.sleep(0.5)
    sys.exit(
        f"bench_serving: {what} did not start; the end of its "
        f"log:\n{log.read_text(errors='replace')[-3000:]}"
    )
