"""Acceptance under a grammar where drafts heed its masks at every drafted token, as they do, and at
the first one alone, which would save a GPU waits; `scripts/bench_round --grammars`.

Prompts are records of JSON, whose next one the target writes, or source code, which it was trained
on and would go on with.
"""

from __future__ import annotations

import argparse
import itertools
import json
import random
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import cache

import torch

from draftsmith.drafters.checkpoint import load
from draftsmith.drafters.interface import TrainedDrafter
from draftsmith.drafters.target.target import Target
from draftsmith.prompts.corpus import Document, held_out, stdlib_code
from draftsmith.serve.config import EngineConfig
from draftsmith.serve.engine.build import build_engine
from draftsmith.serve.sampling.adjustments import Adjustments
from draftsmith.serve.sampling.grammar import Grammar
from draftsmith.serve.sampling.params import SamplingParams
from scripts.bench.markdown_table import header, line
from scripts.paths import ROOT

KINDS = ("function", "class", "module")
NAMES = ("open", "close", "read", "write", "join", "split", "parse", "load")
SCHEMA = {
    "type": "object",
    "properties": {
        "name": {"type": "string"},
        "kind": {"enum": KINDS},
        "lines": {"type": "integer"},
        "public": {"type": "boolean"},
        "arguments": {"type": "array", "items": {"type": "string"}},
    },
    "required": ["name", "kind", "lines", "public", "arguments"],
    "additionalProperties": False,
}
GRAMMARS = {
    "a record's schema": Grammar.json_schema(SCHEMA),
    "any object": Grammar.json_object(),
}


def records(generator: random.Random) -> str:
    """Six records of the schema and the indentation of a seventh."""
    made = [
        {
            "name": f"{generator.choice(NAMES)}_{generator.choice(NAMES)}",
            "kind": generator.choice(KINDS),
            "lines": generator.randrange(5, 300),
            "public": generator.random() < 0.5,
            "arguments": generator.sample(("self", "name", "path", "mode", "value"), 2),
        }
        for _ in range(6)
    ]
    lines = "".join(f"    {json.dumps(one)},\n" for one in made)
    return f"records = [\n{lines}    "


def code(generator: random.Random) -> str:
    """The beginning of a module that the target was not trained on."""
    return f"{generator.choice(_held_out()).text[:400]}\n\ninfo = "


@cache
def _held_out() -> list[Document]:
    return [document for document in stdlib_code() if held_out(document)]


PROMPTS = {"records": records, "code": code}


@contextmanager
def masked(*, at_first_alone: bool) -> Iterator[None]:
    """Drafts of an engine with masks of every drafted token, or of the first alone."""
    adjust = Adjustments.__call__

    def first(
        self: Adjustments, logits: torch.Tensor, rows: torch.Tensor, prefixes: torch.Tensor
    ) -> torch.Tensor:
        return logits.clone() if prefixes.shape[1] else adjust(self, logits, rows, prefixes)

    if at_first_alone:
        Adjustments.__call__ = first  # type: ignore[method-assign]
    try:
        yield
    finally:
        Adjustments.__call__ = adjust  # type: ignore[method-assign]


def tau(
    pair: tuple[Target, TrainedDrafter],
    prompts: Sequence[list[int]],
    params: SamplingParams,
    k: int,
) -> float:
    """Committed tokens per target pass that verified drafts; `params` has the first prompt's
    seed."""
    engine = build_engine(*pair, EngineConfig(k=k, max_length=512, max_batch=len(prompts)))
    assert params.seed is not None
    for seed, prompt in enumerate(prompts, params.seed):
        engine.submit(prompt, replace(params, seed=seed))
    while engine.busy:
        engine.step()
    return 1 + sum(engine.stats.accepted.values()) / engine.stats.offered[0]


def main(given: Sequence[str] | None = None) -> None:
    options = arguments(given)
    torch.set_num_threads(1)
    target = Target.load(options.target)
    pair, tokenizer = (target, load(options.draft, target)), target.tokenizer()
    found = []
    print("\n".join(header("prompts", "grammar", "T", "every token masked", "the first alone")))
    for kind, made in PROMPTS.items():
        generator = random.Random(0)
        prompts = [tokenizer.encode(made(generator)) for _ in range(options.prompts)]
        for (name, grammar), temperature in itertools.product(GRAMMARS.items(), (0.0, 1.0)):
            params = SamplingParams(
                temperature=temperature, grammar=grammar, max_tokens=options.max_tokens
            )
            taus: list[list[float]] = []
            for first in (False, True):
                with masked(at_first_alone=first):
                    taus.append([
                        tau(pair, prompts, replace(params, seed=seed * len(prompts)), options.k)
                        for seed in range(options.seeds if temperature else 1)
                    ])  # fmt: skip
            row = {"prompts": kind, "grammar": name, "temperature": temperature}
            found.append(row | {"every": taus[0], "first": taus[1]})
            print(line(kind, name, f"{temperature:g}", *map(spread, taus)), flush=True)
    print(json.dumps({"torch": torch.__version__, "rows": found}, indent=1))


def spread(values: Sequence[float]) -> str:
    """Mean and, of several, the lowest and the highest."""
    mean = f"{sum(values) / len(values):.2f}"
    return mean if len(values) == 1 else f"{mean} ({min(values):.2f} to {max(values):.2f})"


def arguments(given: Sequence[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--target", default=str(ROOT / "scripts/quickstart_target"))
    parser.add_argument("--draft", default=str(ROOT / "scripts/quickstart_draft"))
    parser.add_argument("--prompts", type=int, default=24)
    parser.add_argument("--max-tokens", type=int, default=96)
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--k", type=int, default=4)
    return parser.parse_args(given)


if __name__ == "__main__":
    main()
