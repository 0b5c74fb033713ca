"""The quickstart's live part: code traffic that turns to prose, served by a pair that learns."""

from __future__ import annotations

import json
import random
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx

from draftsmith.drafters.target.load import load_tokenizer
from draftsmith.files import read_json, write_json, write_text
from draftsmith.progress import Progress
from draftsmith.prompts.corpus import CORPORA, held_out

# Of the model, as clients ask for it.
NAME = "quickstart"


@dataclass(frozen=True)
class Shift:
    """`code` requests of the draft's own domain, then `prose` requests of another."""

    target: Path
    draft: Path
    folder: Path
    k: int
    code: int = 60
    prose: int = 700
    prompt_tokens: int = 48
    max_tokens: int = 80
    clients: int = 4
    seed: int = 7  # of the prompts
    learn: tuple[str, ...] = ("learn.lr=1e-3",)  # options of the daemon
    port: int = 8711


def serve_shift(shift: Shift, command: list[str]) -> None:
    """Writes shift.json: what became of every request, and when versions were swapped in."""
    prompts = traffic(shift)
    with server(shift, command), daemon(shift, command), log(shift) as note:
        served = send(shift, list(enumerate(prompts)), note)
    write_json(
        shift.folder / "shift.json",
        {"code": shift.code, "served": served, "dropped": len(prompts) - len(served)},
    )


def traffic(shift: Shift) -> list[list[int]]:
    """Prompts as token ids. Code comes from held-out files; all of the prose is new to
    the draft."""
    tokenizer = load_tokenizer(shift.target, trust_remote_code=False)
    generator = random.Random(shift.seed)
    code = [document.text for document in CORPORA["stdlib:code"]() if held_out(document)]
    prose = [document.text for document in CORPORA["stdlib:prose"]()]
    drawn = [generator.choice(code) for _ in range(shift.code)] + [
        generator.choice(prose) for _ in range(shift.prose)
    ]
    return [cut(tokenizer, text, shift.prompt_tokens, generator) for text in drawn]


def write_bench_prompts(target: Path, path: Path, count: int = 8, num_tokens: int = 48) -> None:
    """Held-out code, as text of `num_tokens` tokens a prompt."""
    tokenizer, generator = load_tokenizer(target, trust_remote_code=False), random.Random(11)
    texts = [document.text for document in CORPORA["stdlib:code"]() if held_out(document)]
    prompts = [
        tokenizer.decode(cut(tokenizer, generator.choice(texts), num_tokens, generator))
        for _ in range(count)
    ]
    write_text(path, "".join(json.dumps({"prompt": prompt}) + "\n" for prompt in prompts))


def cut(tokenizer: Any, text: str, num_tokens: int, generator: random.Random) -> list[int]:
    begin = generator.randrange(max(1, len(text) - 8 * num_tokens))
    line = text.rfind("\n", 0, begin) + 1
    return tokenizer(text[line : line + 12 * num_tokens], add_special_tokens=False)["input_ids"][
        :num_tokens
    ]


def send(shift: Shift, prompts: list[tuple[int, list[int]]], note: Any) -> list[dict[str, Any]]:
    progress = Progress("learning draft", len(prompts), unit="requests")
    lock, done = threading.Lock(), []

    def one(pair: tuple[int, list[int]]) -> None:
        index, prompt = pair
        record = ask(shift, index, prompt)
        with lock:
            done.append(record)
            note(record)
            recent = done[-40:]
            progress.update(
                len(done), f"alpha over the last {len(recent)}: {pooled_alpha(recent):.3f}"
            )

    with ThreadPoolExecutor(shift.clients) as pool:
        list(pool.map(one, prompts))
    progress.close()
    return sorted(done, key=lambda record: record["index"])


def ask(shift: Shift, index: int, prompt: list[int]) -> dict[str, Any]:
    body = {
        "model": NAME, "prompt": prompt, "max_tokens": shift.max_tokens, "temperature": 1.0,
        "speculation": {"report": True}, "request_class": "code" if index < shift.code else "prose",
    }  # fmt: skip
    begun_s = time.time()
    answer = (
        httpx.post(f"http://127.0.0.1:{shift.port}/v1/completions", json=body, timeout=120)
        .raise_for_status()
        .json()
    )
    report = answer["metrics"]["speculative_decoding"]
    accepted, drafted = report["per_step_accepted"], report["per_step_drafted"]
    return {
        "index": index, "begun_s": begun_s, "ended_s": time.time(),
        "tokens": answer["usage"]["completion_tokens"],
        "rounds": report["num_target_passes"], "accepted": sum(accepted),
        # A position counts as tried when everything before it was kept: alpha is conditional.
        "tried": sum(a + (a < d) for a, d in zip(accepted, drafted)),
    }  # fmt: skip


def pooled_alpha(records: list[dict[str, Any]]) -> float:
    return sum(record["accepted"] for record in records) / max(
        1, sum(record["tried"] for record in records)
    )


@contextmanager
def log(shift: Shift) -> Iterator[Any]:
    """Every finished request at once on disk, so that an interrupted run still shows
    what happened."""
    with open(shift.folder / "requests.jsonl", "w", encoding="utf-8") as file:

        def write(record: dict[str, Any]) -> None:
            file.write(json.dumps(record) + "\n")
            file.flush()

        yield write


@contextmanager
def server(shift: Shift, command: list[str]) -> Iterator[None]:
    words = [
        *command, "serve", "--target", shift.target, "--draft", shift.draft, "--port", shift.port,
        "--k", shift.k, "--name", NAME, "--max-batch", shift.clients, "--threads", 1,
        "--learn", shift.folder / "buffer", "--versions", shift.folder / "versions",
    ]  # fmt: skip
    with process(words, shift.folder / "server.log") as child:
        wait_until_healthy(child, shift.port)
        yield


@contextmanager
def daemon(shift: Shift, command: list[str]) -> Iterator[None]:
    words = [
        *command, "distill", "--target", shift.target, "--draft", shift.draft, "--buffer",
        shift.folder / "buffer",
        "--versions", shift.folder / "versions", "--threads", 1,
        f"learn.unroll.steps={shift.k}", *shift.learn,
    ]  # fmt: skip
    with process(words, shift.folder / "distill.log"):
        yield


@contextmanager
def process(words: list[Any], log_path: Path) -> Iterator[subprocess.Popen]:
    print(
        "  $ draftsmith "
        + " ".join(Path(word).name if isinstance(word, Path) else str(word) for word in words[3:]),
        flush=True,
    )
    with open(log_path, "wb") as output:
        child = subprocess.Popen(
            [str(word) for word in words], stdout=output, stderr=subprocess.STDOUT
        )
        try:
            yield child
        finally:
            child.send_signal(signal.SIGTERM)
            try:
                child.wait(timeout=60)
            except subprocess.TimeoutExpired:
                child.kill()


def wait_until_healthy(child: subprocess.Popen, port: int, limit_s: float = 120) -> None:
    begun_s = time.monotonic()
    while time.monotonic() - begun_s < limit_s:
        if child.poll() is not None:
            sys.exit(
                f"quickstart: the server on port {port} ended with status {child.returncode}; its "
                "log is beside the run"
            )
        try:
            if httpx.get(f"http://127.0.0.1:{port}/health", timeout=2).status_code == 200:
                return
        except httpx.HTTPError:
            time.sleep(0.3)
    sys.exit(f"quickstart: the server on port {port} was not healthy after {limit_s:.0f} s")


def read_shift(folder: Path) -> dict[str, Any]:
    return read_json(folder / "shift.json", "traffic record")
