"""Speed and distribution of a target with weights of 8 bits; `scripts/bench_int8 --help`."""

from __future__ import annotations

import argparse
import math
import os
import statistics
from collections.abc import Callable
from functools import partial
from time import perf_counter
from typing import Any

import torch
from torch import nn

from draftsmith.drafters import checkpoint
from draftsmith.drafters.compiled.captured import capture_lm
from draftsmith.drafters.target.target import Target
from draftsmith.kernels.products.few_rows import few_rows
from draftsmith.kernels.products.int8_rows import Int8Rows, quantised
from draftsmith.prompts.corpus import CORPORA, held_out
from draftsmith.serve.config import EngineConfig
from draftsmith.serve.engine.build import build_engine
from draftsmith.serve.engine.engine import Engine
from draftsmith.serve.sampling.params import SamplingParams
from scripts.bench.engine.step import Variants, measure, target_pass

ROWS = (1, 4, 5, 8, 16)
K, TURNS = 3, 5  # draft tokens of a round, and turns in which engines decode
PROMPTS = (
    "def read(path):\n    with open(path) as file:\n",
    "class Stack:\n    def __init__(self):\n",
    "import os\nimport sys\n\n\ndef main():\n",
)
GROUP = 32  # weights that share a scale in torch's product with 4 bits


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--target", default="scripts/quickstart_target")
    parser.add_argument("--draft", help="decodes with this draft too")
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--steps", type=int, default=5, help="timed steps a turn")
    parser.add_argument("--documents", type=int, default=32, help="held-out texts that are read")
    parser.add_argument("--length", type=int, default=512, help="tokens of each at most")
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    print(f"load average before: {os.getloadavg()[0]:.1f}\n")
    plain, rounded = (
        Target.load(options.target, dtype=dtype) for dtype in (torch.bfloat16, torch.int8)
    )
    agreement(Target.load(options.target, dtype=torch.float32), plain, rounded, options)
    products = {rows: measure(product_variants(plain.model, rows), options.steps) for rows in ROWS}
    sizes = {"bfloat16": plain.pass_bytes(), "int8": rounded.pass_bytes()}
    for target in (plain, rounded):
        capture_lm(target)
    targets = {"bfloat16": plain, "int8": rounded}
    passes = {
        rows: measure(
            {name: target_pass(target, rows) for name, target in targets.items()}, options.steps
        )
        for rows in ROWS
    }
    print({name: f"{size / 1e6:.0f} MB read by a pass" for name, size in sizes.items()}, "\n")
    show("one pass, tokens", passes)
    show("its products alone, rows", products)
    decoded(targets, options)


def decoded(targets: dict[str, Target], options: argparse.Namespace) -> None:
    """Prints tok/s of one greedy stream in the engine, median of turns, and its ratio."""
    drafts = ["none", *([options.draft] if options.draft else [])]
    print(
        f"| draft | {' | '.join(targets)} | int8 / bfloat16 | lowest and highest |\n|---|---|---|---|---|"
    )
    for draft in drafts:
        engines = {
            name: build_engine(
                target,
                None if draft == "none" else checkpoint.load(draft, target),
                EngineConfig(k=0 if draft == "none" else K, max_batch=1, max_length=256),
            )
            for name, target in targets.items()
        }
        turns = [
            {name: speed(engine) for name, engine in engines.items()} for _ in range(TURNS + 1)
        ]
        turns = turns[1:]  # the first met every shape for the first time
        medians = [statistics.median(turn[name] for turn in turns) for name in targets]
        ratios = [turn["int8"] / turn["bfloat16"] for turn in turns]
        print(
            f"| {'none' if draft == 'none' else f'k = {K}'} | "
            f"{' | '.join(f'{median:.0f}' for median in medians)} | "
            f"{statistics.median(ratios):.2f} | {min(ratios):.2f} to {max(ratios):.2f} |"
        )


def speed(engine: Engine) -> float:
    """Committed tokens a second of the same three prompts, one after the other."""
    sampling = SamplingParams(temperature=0.0, max_tokens=48, ignore_eos=True)
    begun_s, count = perf_counter(), 0
    for text in PROMPTS:
        ids = engine.target.tokenizer()(text)["input_ids"]
        count += len(engine.generate([ids], sampling)[0].tokens)
    return count / (perf_counter() - begun_s)


def show(title: str, found: dict[int, dict[str, dict[str, float]]]) -> None:
    """Lowest ms of all turns, and its ratio to bfloat16."""
    names = list(found[ROWS[0]])
    print(f"| {title} | {' | '.join(names)} |\n|{'---|' * (len(names) + 1)}")
    for rows, row in found.items():
        base = row["bfloat16"]["least_ms"]
        cells = (
            f"{row[name]['least_ms']:.2f} ({row[name]['least_ms'] / base:.2f})" for name in names
        )
        print(f"| {rows} | {' | '.join(cells)} |")
    print()


def product_variants(model: nn.Module, rows: int) -> Variants:
    weights = [part.weight.detach() for part in model.modules() if isinstance(part, nn.Linear)]
    states = {
        width: torch.randn(rows, width).bfloat16() for width in {one.shape[1] for one in weights}
    }
    makers: dict[str, Callable[[torch.Tensor], Callable[[torch.Tensor], Any]]] = {
        "bfloat16": lambda weight: few_rows(weight, None) or weight.matmul,
        "int8": lambda weight: Int8Rows([quantised(weight, weight.dtype)], [None], weight.dtype),
        "torch int8": torch_int8,
        "torch int4": torch_int4,
    }
    return {
        name: partial(multiply, [(make(one), states[one.shape[1]]) for one in weights])
        for name, make in makers.items()
    }


def multiply(products: list[tuple[Callable[[torch.Tensor], Any], torch.Tensor]]) -> None:
    for product, rows in products:
        product(rows)


def torch_int8(weight: torch.Tensor) -> Callable[[torch.Tensor], torch.Tensor]:
    """The product that torchao's weights of 8 bits have on a CPU."""
    scales = weight.float().abs().amax(dim=1) / 127
    codes = (weight.float() / scales[:, None]).round().to(torch.int8)
    return lambda rows: torch._weight_int8pack_mm(rows, codes, scales.bfloat16())


def torch_int4(weight: torch.Tensor) -> Callable[[torch.Tensor], torch.Tensor]:
    """That of 4 bits, with a scale and an offset for each group."""
    outputs, width = weight.shape
    groups = weight.float().view(outputs, width // GROUP, GROUP)
    lowest = groups.amin(dim=-1)
    scales = ((groups.amax(dim=-1) - lowest) / 15).clamp(min=1e-6)
    codes = ((groups - lowest[..., None]) / scales[..., None]).round().clamp(0, 15).int()
    aten = torch.ops.aten
    packed = aten._convert_weight_to_int4pack_for_cpu(codes.view(outputs, width), 2)
    steps = torch.stack([scales, lowest + 8 * scales], dim=-1).transpose(0, 1)
    both = steps.contiguous().bfloat16()
    return lambda rows: aten._weight_int4pack_mm_for_cpu(rows, packed, GROUP, both)


@torch.no_grad()
def agreement(exact: Target, plain: Target, rounded: Target, options: argparse.Namespace) -> None:
    """Prints of every next token of the texts: perplexity, the share with the likeliest token of float32,
    and KL from float32's distribution."""
    documents = [one for one in CORPORA["stdlib:code"]() if held_out(one)][: options.documents]
    tokenizer = exact.tokenizer()
    targets = {"float32": exact, "bfloat16": plain, "int8": rounded}
    sums = {name: torch.zeros(3, dtype=torch.float64) for name in targets}
    count = 0
    for document in documents:
        ids = torch.tensor([tokenizer(document.text)["input_ids"][: options.length]])
        logprobs = {name: next_logprobs(target, ids) for name, target in targets.items()}
        right = logprobs["float32"]
        count += len(right)
        for name, own in logprobs.items():
            sums[name] += torch.stack([
                own.gather(1, ids[0, 1:, None]).sum(),
                (own.argmax(dim=-1) == right.argmax(dim=-1)).sum(),
                (right.exp() * (right - own)).sum(),
            ])  # fmt: skip
    print(
        "| target | perplexity | likeliest token of float32 | KL from float32 |\n|---|---|---|---|"
    )
    for name, (likelihood, same, apart) in sums.items():
        perplexity = math.exp(-float(likelihood) / count)
        print(
            f"| {name} | {perplexity:.4f} | {float(same) / count:.2%} | {float(apart) / count:.6f} |"
        )
    print(f"\n{count} tokens of {len(documents)} held-out files\n")


def next_logprobs(target: Target, ids: torch.Tensor) -> torch.Tensor:
    """[T - 1, V] float64"""
    _, hidden = target.states(ids, torch.ones_like(ids), ())
    return torch.log_softmax(target.head(hidden[0, :-1]).double(), dim=-1)


if __name__ == "__main__":
    main()
