"""The quickstart's live part: code traffic that turns to prose, served by a learning pair and by a
static one."""

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

from draftsmith.corpus import CORPORA, held_out
from draftsmith.drafters.target.load import load_tokenizer
from draftsmith.files import read_json, write_json, write_text
from draftsmith.progress import Progress

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
    static_every: int = 6  # the static pair serves every sixth prompt
    prompt_tokens: int = 48
    max_tokens: int = 80
    clients: int = 4
    seed: int = 7  # of the prompts
    learning_port: int = 8711
    static_port: int = 8712


def serve_shift(shift: Shift, command: list[str]) -> None:
    """Writes shift.json: what became of every request, when versions were swapped in, and both
    servers' totals."""
    prompts = traffic(shift)
    learning = server(
        shift,
        command,
        shift.learning_port,
        "--learn",
        shift.folder / "buffer",
        "--versions",
        shift.folder / "versions",
    )
    with learning, daemon(shift, command), log(shift, "learning") as note:
        served = send(shift, shift.learning_port, list(enumerate(prompts)), "learning draft", note)
    some = [pair for pair in enumerate(prompts) if pair[0] % shift.static_every == 0]
    with server(shift, command, shift.static_port), log(shift, "static") as note:
        static = send(shift, shift.static_port, some, "static draft", note)
    dropped = len(prompts) - len(served) + len(some) - len(static)
    write_json(
        shift.folder / "shift.json",
        {"code": shift.code, "learning": served, "static": static, "dropped": dropped},
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


def send(
    shift: Shift, port: int, prompts: list[tuple[int, list[int]]], label: str, note: Any
) -> list[dict[str, Any]]:
    progress, lock, done = Progress(label, len(prompts), unit="requests"), threading.Lock(), []

    def one(pair: tuple[int, list[int]]) -> None:
        index, prompt = pair
        record = ask(shift, port, index, prompt)
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


def ask(shift: Shift, port: int, index: int, prompt: list[int]) -> dict[str, Any]:
    body = {
        "model": NAME, "prompt": prompt, "max_tokens": shift.max_tokens, "temperature": 1.0,
        "speculation": {"report": True}, "request_class": "code" if index < shift.code else "prose",
    }  # fmt: skip
    begun_s = time.time()
    answer = (
        httpx.post(f"http://127.0.0.1:{port}/v1/completions", json=body, timeout=120)
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
def log(shift: Shift, name: str) -> Iterator[Any]:
    """Every finished request at once on disk, so that an interrupted run still shows
    what happened."""
    with open(shift.folder / f"requests-{name}.jsonl", "w", encoding="utf-8") as file:

        def write(record: dict[str, Any]) -> None:
            file.write(json.dumps(record) + "\n")
            file.flush()

        yield write


@contextmanager
def server(shift: Shift, command: list[str], port: int, *options: str | Path) -> Iterator[None]:
    words = [
        *command, "serve", "--target", shift.target, "--draft", shift.draft, "--port", port, "--k",
        shift.k,
        "--name", NAME, "--max-batch", shift.clients, "--threads", 1, *options,
    ]  # fmt: skip
    with process(words, shift.folder / f"server-{port}.log") as child:
        wait_until_healthy(child, port)
        yield


@contextmanager
def daemon(shift: Shift, command: list[str]) -> Iterator[None]:
    words = [
        *command, "distill", "--target", shift.target, "--draft", shift.draft, "--buffer",
        shift.folder / "buffer",
        "--versions", shift.folder / "versions", "--threads", 1,
        "learn.lr=1e-3", f"learn.unroll.steps={shift.k}",
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
