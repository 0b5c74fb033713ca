"""The other systems of scripts/bench_serving: transformers, vLLM and llama.cpp, each started as its
users start it."""

from __future__ import annotations

import json
import os
import re
import shutil
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
from typing import Any

import httpx
import torch
from safetensors.torch import load_file, save_file

from scripts.bench.serving.systems import TIMEOUT_S, Generate, Served, System, ask
from scripts.paths import ROOT

MENDED = "draftsmith.fleet.vllm.expand_kernel"
VLLM_VARIABLES = {
    "VLLM_CPU_KVCACHE_SPACE": "1",
    "VLLM_NO_USAGE_STATS": "1",
    "HF_HUB_OFFLINE": "1",
}
# Samplers that llama-server has on by default.
PLAIN_SAMPLING = {"top_k": 0, "top_p": 1.0, "min_p": 0.0}


@dataclass(frozen=True)
class Bench:
    """Comparison of one target in one dtype, its drafts, and the systems asked for."""

    target: Path
    eagle3: Path
    draft_lm: Path
    exports: Path  # of the drafts, a folder for each engine and draft
    dtype: str  # int8: stored in bfloat16, rounded by each engine in its own way
    k: int
    streams: int  # most at once
    wanted: re.Pattern[str]

    def wants(self, name: str) -> bool:
        return self.wanted.search(name) is not None

    def exported(self, draft: Path, engine: str, *options: str) -> Path | None:
        """Folder of the draft in an engine's layout, made once; None where the layout has no place
        for it, which is printed."""
        out = self.exports / f"{engine}-{draft.name}-{self.dtype}"
        if not out.exists():
            command = [sys.executable, "-m", "draftsmith.cli", "export", draft, "--to", engine]
            command += ["--target", self.target, "--out", out, *options]
            done = subprocess.run([str(word) for word in command], capture_output=True, text=True)
            if done.returncode != 0:
                said = (done.stderr.strip().splitlines() or ["no reason given"])[-1]
                print(f"bench_serving: {draft.name} is left out for {engine}: {said}", flush=True)
                return None
        return out


def in_dtype(source: Path, out: Path, dtype: str) -> Path:
    """A copy of a checkpoint whose weights are stored in `dtype`, in bfloat16 for int8."""
    dtype = "bfloat16" if dtype == "int8" else dtype
    shutil.copytree(source, out, dirs_exist_ok=True)
    weights = load_file(out / "model.safetensors")
    weights = {name: tensor.to(getattr(torch, dtype)) for name, tensor in weights.items()}
    save_file(weights, out / "model.safetensors", {"format": "pt"})
    config = json.loads((out / "config.json").read_text(encoding="utf-8"))
    text = json.dumps(config | {"dtype": dtype}, indent=2) + "\n"
    (out / "config.json").write_text(text, encoding="utf-8")
    return out


@contextmanager
def generator(bench: Bench, draft: Path | None) -> Iterator[subprocess.Popen]:
    script = [sys.executable, "-m", "scripts.bench.serving.transformers_peer"]
    script += ["--target", str(bench.target), "--dtype", bench.dtype]
    script += [] if draft is None else ["--draft", str(draft)]
    with subprocess.Popen(
        script, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, cwd=ROOT
    ) as worker:
        ask(worker, None)
        yield worker
        worker.kill()


def other_systems(stack: ExitStack, bench: Bench) -> Iterator[System]:
    """Those of the variables DRAFTSMITH_VLLM_PYTHON and DRAFTSMITH_LLAMA_SERVER, and transformers. Of
    these llama.cpp alone rounds a target to int8 that is stored otherwise."""
    vllm, llama = (os.environ.get(f"DRAFTSMITH_{name}") for name in ("VLLM_PYTHON", "LLAMA_SERVER"))
    if bench.dtype != "int8":
        yield from transformers_systems(stack, bench)
        if vllm:
            print("bench_serving: starting vLLM, about a minute each time", flush=True)
            yield from vllm_systems(stack, bench, vllm)
    if llama:
        yield from llama_systems(stack, bench, llama)


def transformers_systems(stack: ExitStack, bench: Bench) -> Iterator[System]:
    modes = {
        "transformers": "plain",
        "transformers, assisted by draft-lm": "assisted",
        "transformers, prompt lookup": "lookup",
    }
    chosen = {name: mode for name, mode in modes.items() if bench.wants(name)}
    if chosen:
        assisted = "assisted" in chosen.values()
        draft = bench.exported(bench.draft_lm, "hf") if assisted else None
        worker = stack.enter_context(generator(bench, draft))
        yield from (Generate(name, mode, worker) for name, mode in chosen.items())


def vllm_systems(stack: ExitStack, bench: Bench, python: str) -> Iterator[System]:
    mended = mends(python)
    methods: dict[str, tuple[dict[str, Any] | None, Path | None]] = {
        "no draft": (None, None),
        "n-gram": ({"method": "ngram", "prompt_lookup_min": 2, "prompt_lookup_max": 4}, None),
        "eagle3": ({"method": "eagle3"}, bench.eagle3),
        "draft-lm": ({"method": "draft_model"}, bench.draft_lm),
    }
    layouts = {"eagle3": "vllm", "draft-lm": "hf"}
    for name, (method, draft) in methods.items():
        if not bench.wants(f"vllm-cpu, {name}"):
            continue
        options = [] if not mended else ["--additional-config", mended]
        if method is not None:
            method = method | {"num_speculative_tokens": bench.k}
            if draft is not None:
                folder = bench.exported(draft, layouts[name])
                if folder is None:
                    continue
                method["model"] = str(folder)
            options += ["--speculative-config", json.dumps(method)]
        url, group = stack.enter_context(
            vllm_server(python, bench.target, options, dtype=bench.dtype)
        )
        # What vllm-cpu 0.32 samples while it speculates is biased, unless its kernel is mended.
        yield Served(
            f"vllm-cpu, {name}",
            url,
            biased_when_sampled=method is not None and not mended,
            group=group,
        )


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
    command = vllm_command(python, target, options, dtype=dtype)
    with server("vLLM", command, {**VLLM_VARIABLES, **(variables or {})}) as (url, group):
        os.killpg(group, signal.SIGSTOP)
        yield url, group


def vllm_command(
    python: str, target: Path, options: Sequence[str], *, dtype: str = "float32"
) -> list[str]:
    command = [python, "-m", "vllm.entrypoints.openai.api_server", "--model", str(target)]
    return [*command, "--dtype", dtype, "--no-enable-log-requests", *options]


def llama_systems(stack: ExitStack, bench: Bench, program: str) -> Iterator[System]:
    """llama.cpp's server with the target and the drafts as GGUF in the same dtype, one thread as
    ours."""
    spec = ["--spec-draft-n-max", str(bench.k)]
    drafts: dict[str, tuple[Path, list[str]] | None] = {
        "no draft": None,
        "n-gram": None,
        "eagle3": (bench.eagle3, ["--spec-type", "draft-eagle3", *spec]),
        "draft-lm": (bench.draft_lm, ["--spec-type", "draft-simple", *spec]),
    }
    ngram = ["--spec-type", "ngram-simple", "--spec-ngram-simple-size-n", "3"]
    ngram += ["--spec-ngram-simple-size-m", str(bench.k)]
    chosen = {name: draft for name, draft in drafts.items() if bench.wants(f"llama.cpp, {name}")}
    if not chosen:
        return
    with_target = bench.exported(bench.draft_lm, "gguf", "--with-target")
    if with_target is None:
        return
    weights = with_target / "target.gguf"
    if bench.dtype == "int8":
        weights = rounded(weights, program)
    for name, draft in chosen.items():
        options = ngram if name == "n-gram" else []
        if draft is not None:
            folder = bench.exported(draft[0], "gguf", "--with-target")
            if folder is None:
                continue
            options = ["-md", str(folder / "draft.gguf"), *draft[1]]
        command = [program, "-m", str(weights), "-t", "1", "--offline"]
        command += ["--no-ui", "-np", str(bench.streams), "-c", str(1024 * bench.streams)]
        url, _ = stack.enter_context(server("llama.cpp", [*command, *options], {}))
        yield Served(f"llama.cpp, {name}", url, extra=PLAIN_SAMPLING)


def rounded(weights: Path, server_program: str) -> Path:
    """A GGUF with weights of 8 bits (Q8_0), by the llama-quantize beside the server."""
    out = weights.with_name("target-q8_0.gguf")
    program = Path(server_program).with_name("llama-quantize")
    if not program.exists():
        sys.exit(f"bench_serving: {program} is not there; build it with llama-server, for int8")
    command = [str(program), str(weights), str(out), "Q8_0"]
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode != 0:
        sys.exit(f"bench_serving: llama-quantize failed: {done.stderr[-500:]}")
    return out


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
