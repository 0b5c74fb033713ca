"""The rows about the system: a real server and a real daemon over HTTP, then swaps forced once a
second under traffic."""

from __future__ import annotations

import json
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx

from draftsmith.drafters.published import versions
from draftsmith.files import write_text
from scripts.bench.online.cells import FIRST, SECOND, Cell
from scripts.bench.online.domains import asks
from scripts.bench.online.setting import LEARN, Setting
from scripts.bench.online.streams import blocks
from scripts.bench.online.world import SAMPLING, K
from scripts.demo.traffic import pooled_alpha, process, wait_until_healthy
from scripts.paths import ROOT

COMMAND = [sys.executable, "-m", "draftsmith.cli"]
CLIENTS = 8
PORT = 8741
PATIENCE_S = 900.0  # with a machine that has much else to do
LEARN_FLAGS = [
    f"learn.unroll.steps={LEARN.unroll.steps}",
    *(
        f"learn.{name}={getattr(LEARN, name)}"
        for name in ("lr", "warmup_steps", "steps", "max_length")
    ),
]


def run_system(setting: Setting, cell: Cell) -> dict[str, Any]:
    count = int(cell.arguments["requests"])
    stream = blocks((FIRST, count // 4), (SECOND, count))
    prompts = [ask.prompt for ask in asks(setting.prompts(cell.seed), stream)]
    with setting.room(f"system-{cell.seed}") as folder:
        draft, url = setting.draft(cell.seed), f"http://127.0.0.1:{PORT + cell.seed}"
        serving = ["--learn", folder / "buffer", "--versions", folder / "versions"]
        words = [
            *COMMAND,
            "serve",
            "--target",
            setting.target.name,
            "--draft",
            draft,
            "--port",
            PORT + cell.seed,
            "--k",
            K,
        ]
        words += ["--max-batch", CLIENTS, "--threads", 1, "--name", "online", *serving]
        with process(words, folder / "server.log") as child:
            wait_until_healthy(child, PORT + cell.seed, limit_s=PATIENCE_S)
            with learner(setting, draft, folder):
                begun_s = time.monotonic()
                learned = send(url, prompts)
                learned_s = time.monotonic() - begun_s
            published = versions.latest(folder / "versions") or 1
            # so that there are two to choose from
            setting.publish(folder / "versions", setting.load(draft))
            with flipping(folder / "versions"):
                flipped = send(url, prompts)
            metrics = httpx.get(f"{url}/metrics", timeout=30).text
    return {
        "requests": len(prompts) * 2,
        "dropped": sum(one is None for one in learned + flipped),
        "published": published - 1,
        "swaps": metric(metrics, "draftsmith_swaps_total"),
        "swaps_refused": metric(metrics, "draftsmith_swaps_refused_total"),
        "pause_p99_s": metric(metrics, "draftsmith_swap_pause_seconds_p99"),
        "pause_max_s": metric(metrics, "draftsmith_swap_pause_seconds_max"),
        "alpha_at_shift": alpha(learned[count // 4 :][: count // 4]),
        "alpha_at_end": alpha(learned[-count // 4 :]),
        "seconds": learned_s,
    }


@contextmanager
def learner(setting: Setting, draft: Path, folder: Path) -> Iterator[None]:
    words = [
        *COMMAND, "distill", "--target", setting.target.name, "--draft", draft, "--buffer",
        folder / "buffer",
        "--versions", folder / "versions", "--threads", 1, *LEARN_FLAGS,
    ]  # fmt: skip
    with process(words, folder / "distill.log") as child:
        wait_for_version(child, folder / "versions")
        yield


def wait_for_version(child: subprocess.Popen, root: Path) -> None:
    begun_s = time.monotonic()
    while versions.latest(root) is None:
        if child.poll() is not None or time.monotonic() - begun_s > PATIENCE_S:
            sys.exit(
                "bench_online: the learner did not publish the starting draft; its log is beside "
                "the run"
            )
        time.sleep(0.2)


@contextmanager
def flipping(root: Path) -> Iterator[None]:
    """Another version is chosen as often as servers look, whatever it is worth: what counts is the
    pause."""
    known, stop = versions.versions(root), threading.Event()

    def flip() -> None:
        turn = 0
        while not stop.wait(1.1):
            write_text(root / versions.CURRENT, f"{known[turn % len(known)]}\n")
            turn += 1

    thread = threading.Thread(target=flip)
    thread.start()
    try:
        yield
    finally:
        stop.set()
        thread.join()


def send(url: str, prompts: list[list[int]]) -> list[dict[str, Any] | None]:
    """None for a request that was not answered in full."""

    def one(index: int) -> dict[str, Any] | None:
        body = {
            "model": "online", "prompt": prompts[index], "max_tokens": SAMPLING.max_tokens,
            "temperature": SAMPLING.temperature,
            "ignore_eos": True, "speculation": {"report": True},
        }  # fmt: skip
        try:
            answer = (
                httpx.post(f"{url}/v1/completions", json=body, timeout=300)
                .raise_for_status()
                .json()
            )
        except (httpx.HTTPError, json.JSONDecodeError):
            return None
        if answer["usage"]["completion_tokens"] != SAMPLING.max_tokens:
            return None
        report = answer["metrics"]["speculative_decoding"]
        accepted, drafted = report["per_step_accepted"], report["per_step_drafted"]
        return {
            "accepted": sum(accepted),
            "tried": sum(a + (a < d) for a, d in zip(accepted, drafted, strict=True)),
        }

    with ThreadPoolExecutor(CLIENTS) as pool:
        return list(pool.map(one, range(len(prompts))))


def alpha(answers: list[dict[str, Any] | None]) -> float:
    return pooled_alpha([one for one in answers if one is not None])


def metric(text: str, name: str) -> float:
    """Over all labels."""
    lines = [line for line in text.splitlines() if line.startswith((f"{name} ", f"{name}{{"))]
    return max((float(line.rsplit(" ", 1)[1]) for line in lines), default=float("nan"))


def run_capture(setting: Setting, cell: Cell) -> dict[str, Any]:
    """Cost of recording, by scripts/bench_records."""
    out = setting.work / "capture.json"
    words = [
        sys.executable, "-m", "scripts.bench.engine.records", "--target",
        setting.target.name,
        "--draft", setting.draft(cell.seed), "--data", setting.data(cell.seed), "--k", K, "--turns",
        cell.arguments["turns"],
        "--tokens", SAMPLING.max_tokens, "--temperature", SAMPLING.temperature, "--out", out,
    ]  # fmt: skip
    subprocess.run([str(word) for word in words], check=True, stdout=subprocess.DEVNULL, cwd=ROOT)
    return json.loads(out.read_text(encoding="utf-8"))
