"""Three domains of real text that every machine with draftsmith holds, and the traffic of
scripts/bench_online made of them.

code: the standard library's source. prose: the manual pages of `help()`. headers: the C++ headers
that PyTorch's wheels carry.
"""

from __future__ import annotations

import bisect
import random
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import cache
from itertools import accumulate
from pathlib import Path
from typing import Any

import torch

from draftsmith.prompts.corpus import Document, stdlib_code, stdlib_prose

PROMPT_TOKENS = 24
HEADERS = ("torch/csrc", "c10")  # written by hand; ATen/ops is generated


def torch_headers() -> list[Document]:
    """About 6 MB, in path order."""
    root = Path(torch.__file__).parent / "include"
    paths = sorted(path for folder in HEADERS for path in (root / folder).rglob("*.h"))
    texts = [(path, path.read_text(encoding="utf-8", errors="ignore")) for path in paths]
    return [Document(str(path.relative_to(root)), text) for path, text in texts if len(text) > 200]


DOMAINS: dict[str, Callable[[], list[Document]]] = {
    "code": stdlib_code,
    "prose": stdlib_prose,
    "headers": torch_headers,
}


@dataclass(frozen=True)
class Ask:
    """One request: its number is its seed, so that every drafter is asked the same."""

    number: int
    domain: str
    prompt: list[int]


class Prompts:
    """Beginnings of lines anywhere in a domain's documents, each character as likely."""

    def __init__(self, tokenizer: Any, *, seed: int):
        self.tokenizer, self.seed = tokenizer, seed

    def ask(self, number: int, domain: str) -> Ask:
        generator = random.Random(f"{self.seed} {domain} {number}")
        while True:
            tokens = self._cut(domain, generator)
            if len(tokens) == PROMPT_TOKENS:
                return Ask(number, domain, tokens)

    def _cut(self, domain: str, generator: random.Random) -> list[int]:
        texts, ends = documents(domain)
        text = texts[bisect.bisect_right(ends, generator.randrange(ends[-1]))]
        line = text.rfind("\n", 0, generator.randrange(max(1, len(text) - 8 * PROMPT_TOKENS))) + 1
        return self.tokenizer(text[line : line + 16 * PROMPT_TOKENS], add_special_tokens=False)[
            "input_ids"
        ][:PROMPT_TOKENS]


@cache
def documents(domain: str) -> tuple[list[str], list[int]]:
    """Texts, and where each ends when they stand one after another."""
    texts = [document.text for document in DOMAINS[domain]()]
    return texts, list(accumulate(map(len, texts)))


def asks(prompts: Prompts, stream: Sequence[str], *, begin: int = 0) -> Iterator[Ask]:
    for number, domain in enumerate(stream, start=begin):
        yield prompts.ask(number, domain)
