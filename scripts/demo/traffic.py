"""The quickstart's live part: code traffic that turns to prose, served by a pair that learns."""

from __future__ import annotations

import random
import subprocess
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx

from draftsmith.drafters.target.load import load_tokenizer
from draftsmith.files import write_json
from draftsmith.progress import Progress
from draftsmith.prompts.corpus import CORPORA, held_out
from draftsmith.serve.bench.command import started
from scripts.demo.commands import COMMAND, Words, show


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


def serve_shift(shift: Shift) -> None:
    """Writes shift.json: what became of every request."""
    prompts = traffic(shift)
    both = [
        "--target", str(shift.target), "--draft", str(shift.draft), "--threads", "1",
        "--versions", str(shift.folder / "versions"),
    ]  # fmt: skip
    buffer, options = str(shift.folder / "buffer"), (f"learn.unroll.steps={shift.k}", *shift.learn)
    serve = [*both, "--learn", buffer, "--k", str(shift.k), "--max-batch", str(shift.clients)]
    learn = ["distill", *both, "--buffer", buffer, *options]
    show(["serve", *serve])
    with started(serve, timeout_s=120) as url, process(learn, shift.folder / "distill.log"):
        served = send(shift, url, list(enumerate(prompts)))
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


def cut(tokenizer: Any, text: str, num_tokens: int, generator: random.Random) -> list[int]:
    begin = generator.randrange(max(1, len(text) - 8 * num_tokens))
    line = text.rfind("\n", 0, begin) + 1
    return tokenizer(text[line : line + 12 * num_tokens], add_special_tokens=False)["input_ids"][
        :num_tokens
    ]


def send(shift: Shift, url: str, prompts: list[tuple[int, list[int]]]) -> list[dict[str, Any]]:
    progress = Progress("learning draft", len(prompts), unit="requests")
    lock, done = threading.Lock(), []

    def one(pair: tuple[int, list[int]]) -> None:
        index, prompt = pair
        record = ask(shift, url, index, prompt)
        with lock:
            done.append(record)
            recent = done[-40:]
            progress.update(
                len(done), f"alpha over the last {len(recent)}: {pooled_alpha(recent):.3f}"
            )

    with ThreadPoolExecutor(shift.clients) as pool:
        list(pool.map(one, prompts))
    progress.close()
    return sorted(done, key=lambda record: record["index"])


def ask(shift: Shift, url: str, index: int, prompt: list[int]) -> dict[str, Any]:
    body = {
        "prompt": prompt, "max_tokens": shift.max_tokens, "temperature": 1.0,
        "speculation": {"report": True}, "request_class": "code" if index < shift.code else "prose",
    }  # fmt: skip
    answer = httpx.post(f"{url}/v1/completions", json=body, timeout=120).raise_for_status().json()
    report = answer["metrics"]["speculative_decoding"]
    accepted, drafted = report["per_step_accepted"], report["per_step_drafted"]
    return {
        "index": index, "tokens": answer["usage"]["completion_tokens"],
        "rounds": report["num_target_passes"], "accepted": sum(accepted),
        # A position counts as tried when everything before it was kept: alpha is conditional.
        "tried": sum(a + (a < d) for a, d in zip(accepted, drafted)),
    }  # fmt: skip


def pooled_alpha(records: list[dict[str, Any]]) -> float:
    return sum(record["accepted"] for record in records) / max(
        1, sum(record["tried"] for record in records)
    )


@contextmanager
def process(words: Words, log_path: Path) -> Iterator[None]:
    """A command of draftsmith that runs meanwhile."""
    show(words)
    command = [*COMMAND, *map(str, words)]
    with open(log_path, "wb") as output:
        child = subprocess.Popen(command, stdout=output, stderr=subprocess.STDOUT)
        try:
            yield
        finally:
            child.terminate()
            try:
                child.wait(timeout=60)
            except subprocess.TimeoutExpired:
                child.kill()
