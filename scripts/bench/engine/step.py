"""Micro benchmark of one step; `scripts/bench_step --help`. Variants take turns, so that a loaded
machine slows them alike."""

from __future__ import annotations

import argparse
import json
import os
import platform
import statistics
from collections.abc import Callable
from functools import partial
from pathlib import Path
from time import perf_counter
from typing import Any
from unittest.mock import patch

import torch
import torch._dynamo
import torch._inductor.config
import transformers
from torch import nn

from draftsmith.drafters.compiled import replay, rewrite
from draftsmith.drafters.compiled.captured import capture_forwards, capture_lm
from draftsmith.drafters.compiled.packed_linear import GatedLinear, PackedLinear
from draftsmith.drafters.interface import DraftInputs
from draftsmith.drafters.options import DraftLmOptions, Eagle3Options, MtpOptions
from draftsmith.drafters.registry import FAMILIES
from draftsmith.drafters.target.target import Target
from draftsmith.kernels.attention.paged import PagedPass
from draftsmith.kernels.forward.row_steps import row_steps
from draftsmith.kernels.products import few_rows
from draftsmith.kernels.sampling import random_streams
from draftsmith.kernels.sampling.draw import draw, draw_torch
from draftsmith.kernels.sampling.filters import SamplingRows, process
from draftsmith.kernels.sampling.random_streams import Purpose
from draftsmith.kernels.verify.chain import verify_chain
from draftsmith.kernels.verify.chain_compiled import Drafts, verify_chain_compiled
from scripts.bench.engine.kernel_times import kernel_times
from scripts.bench.engine.product_times import show_products

TOKENS = (1, 4, 8)
DRAFTS = {"eagle3": Eagle3Options(), "mtp": MtpOptions(), "draft-lm": DraftLmOptions()}
CONTEXT, BLOCK_SIZE, TURNS = 200, 16, 12  # positions before the step; turns of each variant
GATED = ("gate_proj", "up_proj")
JOINED = (("q_proj", "k_proj", "v_proj"), GATED)
PRODUCTS = ("plain", "packed", "captured", "small pages", "bfloat16", "int8")
# those of a target; else plain
PRODUCTS_OF = {"captured": "captured", "many calls": "captured", "unfused": "small pages"}
SMALL_PAGES = patch.object(
    few_rows, "empty_in_huge_pages", lambda count, dtype: torch.empty(count, dtype=dtype)
)
Variants = dict[str, Callable[[], Any]]


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--target", default="scripts/quickstart_target")
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--steps", type=int, default=25, help="timed steps a turn")
    parser.add_argument("--k", type=int, default=3, help="draft tokens of a draft round")
    parser.add_argument(
        "--dtype", default="float32", choices=("float32", "bfloat16"), help="of target and drafts"
    )
    parser.add_argument(
        "--compile", action="store_true", help="torch.compile of the target too: takes minutes"
    )
    parser.add_argument(
        "--kernels", action="store_true", help="only the captured pass, by its kernels"
    )
    parser.add_argument(
        "--products", action="store_true", help="only its products, beside torch's, by shape"
    )
    parser.add_argument("--out", type=Path, help="writes the JSON here too")
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    if options.kernels:
        show_kernels(options)
        return
    if options.products:
        show_shapes(options)
        return
    own, captured, called, unfused = (
        Target.load(options.target, dtype=options.dtype) for _ in range(4)
    )
    targets = {"own": own, "packed": with_packed_linears(options), "captured": captured}
    targets |= {"many calls": called, "unfused": unfused}
    ready_s = {"captured": seconds(lambda: capture_lm(captured))}
    # The same kernels, each called from Python.
    with patch.object(replay, "one_call", lambda graph, constants: None):
        capture_lm(called)
    # As it was before: torch's operations between products, whose weights lie in small pages.
    with SMALL_PAGES, patch.object(rewrite, "row_steps", lambda dtype: None):
        capture_lm(unfused)
    if options.compile:
        targets["compiled"] = compiled(Target.load(options.target, dtype=options.dtype))
        ready_s["compiled"] = seconds(lambda: every_pass(targets["compiled"]))
    load = os.getloadavg()[0]
    report = {
        "machine": platform.processor() or platform.machine(),
        "versions": {"torch": torch.__version__, "transformers": transformers.__version__},
        "threads": options.threads,
        "load_average_before": load,
        "target": options.target,
        "dtype": options.dtype,
        "ready_s": ready_s,
        "passes": {f"{count} tokens": measure(target_variants(targets, count), options.steps) for count in TOKENS},
        "matmuls": {f"{count} tokens": measure(matmul_variants(own.model, count), options.steps) for count in TOKENS},
        "draft_matmuls": {
            f"{family}, {count} tokens": measure(matmul_variants(new_draft(family, own), count), options.steps)
            for family in DRAFTS
            for count in TOKENS
        },
        "draft_rounds": {
            f"{family}, k = {options.k}, T = {temperature}": measure(
                draft_variants(family, own, captured, options.k, temperature), options.steps
            )
            for family in DRAFTS
            for temperature in (0, 1)
        },
        "sampling": {
            name: measure(variants, options.steps)
            for name, variants in sampling_variants(own.vocab_size, options.k).items()
        },
    }  # fmt: skip
    report["not_arithmetic"] = {
        f"{name}, {variant}": round(
            1
            - report["matmuls"][name][PRODUCTS_OF.get(variant, "plain")]["least_ms"]
            / row["least_ms"],
            2,
        )
        for name, rows in report["passes"].items()
        for variant, row in rows.items()
    }
    show(report)
    text = json.dumps(report, indent=1)
    print(text)
    if options.out is not None:
        options.out.write_text(text + "\n", encoding="utf-8")


@torch.inference_mode()
def show_kernels(options: argparse.Namespace) -> None:
    target = Target.load(options.target, dtype=options.dtype)
    capture_lm(target)
    columns = [
        kernel_times(target, target_pass(target, count), TURNS * options.steps) for count in TOKENS
    ]
    if not all(columns):
        raise SystemExit("--kernels: a pass of this target is not one call here; leave it out")
    if options.out is not None:
        report = {f"{count} tokens": ms for count, ms in zip(TOKENS, columns, strict=True)}
        options.out.write_text(
            json.dumps({"kernels_ms": report}, indent=1) + "\n", encoding="utf-8"
        )
    print(f"{'least ms, tokens':28}" + "".join(f"{count:>10}" for count in TOKENS))
    for label in columns[0]:
        print(f"{label:28}" + "".join(f"{column[label]:10.3f}" for column in columns))


def show_shapes(options: argparse.Namespace) -> None:
    target = Target.load(options.target, dtype=options.dtype)
    report = show_products(captured_products(target.model), options.steps)
    if options.out is not None:
        options.out.write_text(
            json.dumps({"products_ms": report}, indent=1) + "\n", encoding="utf-8"
        )


def measure(variants: Variants, steps: int) -> dict[str, dict[str, float]]:
    """Median over turns of a turn's fastest step, and the fastest of all, which a loaded machine
    disturbs least."""
    times: dict[str, list[float]] = {name: [] for name in variants}
    with torch.inference_mode():
        for turn in range(TURNS + 1):
            for name, run in variants.items():
                fastest_s = min(timed(run) for _ in range(steps))
                if turn > 0:
                    times[name].append(fastest_s)
    return {
        name: {
            "ms": round(1e3 * statistics.median(values), 3),
            "least_ms": round(1e3 * min(values), 3),
        }
        for name, values in times.items()
    }


def timed(run: Callable[[], Any]) -> float:
    begun_s = perf_counter()
    run()
    return perf_counter() - begun_s


def target_variants(targets: dict[str, Target], count: int) -> Variants:
    return {name: target_pass(target, count) for name, target in targets.items()}


def with_packed_linears(options: argparse.Namespace) -> Target:
    """The target's own forward with each linear layer's weights laid out by oneDNN: what packing
    gives without a captured forward."""
    target = Target.load(options.target, dtype=options.dtype)
    for module in target.model.modules():
        if isinstance(module, nn.Linear):
            module.forward = first_of(PackedLinear([module.weight.detach()], [module.bias]))
    return target


def first_of(linear: PackedLinear) -> Callable[[torch.Tensor], torch.Tensor]:
    return lambda rows: linear(rows)[0]


def compiled(target: Target) -> Target:
    """With torch.compile at its best for a CPU: weights frozen and laid out, a graph for each
    number of tokens, paged attention left as it is."""
    torch._inductor.config.freezing = True
    torch._dynamo.config.recompile_limit = torch._dynamo.config.accumulated_recompile_limit = 1024
    PagedPass.attend = torch.compiler.disable(PagedPass.attend)  # type: ignore[method-assign]
    target.body.compile(dynamic=False)
    return target


@torch.inference_mode()
def every_pass(target: Target) -> None:
    """One step of each size, which is when torch.compile compiles."""
    for count in TOKENS:
        target_pass(target, count)()


def seconds(run: Callable[[], Any]) -> float:
    return round(timed(run), 2)


def target_pass(target: Target, count: int) -> Callable[[], Any]:
    pool, table = (
        target.new_pool(CONTEXT // BLOCK_SIZE + 4, BLOCK_SIZE),
        torch.arange(1, CONTEXT // BLOCK_SIZE + 3)[None],
    )
    positions = torch.arange(CONTEXT, CONTEXT + count)
    ids, rows, lengths = torch.full((1, count), 7), torch.arange(count), torch.tensor([count])
    return lambda: target.forward(
        ids, positions[None], PagedPass(pool, table, positions, lengths), rows
    )


def captured_products(model: nn.Module) -> list[PackedLinear]:
    """A model's products as a captured forward has them: of one input in one, a gate within it."""
    found: list[PackedLinear] = []
    layers = [one.weight for one in model.modules() if isinstance(one, nn.Linear)]
    options = {"pass_bytes": sum(weight.nbytes for weight in layers)}
    for parent in model.modules():
        linears = {
            name: one.weight.detach()
            for name, one in parent.named_children()
            if isinstance(one, nn.Linear)
        }
        for names in JOINED:
            if linears.keys() >= set(names):
                weights, biases = [linears.pop(name) for name in names], [None] * len(names)
                steps = row_steps(weights[0].dtype) if names is GATED else None
                found.append(
                    PackedLinear(weights, biases, **options)
                    if steps is None
                    else GatedLinear(weights, biases, steps, **options)
                )
        found += [PackedLinear([weight], [None], **options) for weight in linears.values()]
    return found


def matmul_variants(model: nn.Module, count: int) -> Variants:
    """A model's matrices alone: as torch multiplies them, packed by oneDNN, as a captured forward
    has them, with its gates, and in fewer bits, for drafts to come."""
    weights = [
        module.weight.detach() for module in model.modules() if isinstance(module, nn.Linear)
    ]
    packed = [torch.ops.mkldnn._reorder_linear_weight(weight, 8) for weight in weights]
    captured = captured_products(model)
    with SMALL_PAGES:
        small_pages = captured_products(model)
    narrow = [torch.ops.mkldnn._reorder_linear_weight(weight.bfloat16(), 8) for weight in weights]
    scales = [weight.abs().amax(dim=1, keepdim=True) / 127 for weight in weights]
    int8 = [
        ((weight / scale).round().to(torch.int8), scale[:, 0].bfloat16())
        for weight, scale in zip(weights, scales)
    ]
    rows = {
        weight.shape[1]: torch.randn(count, weight.shape[1], dtype=weight.dtype)
        for weight in weights
    }
    multiply = torch.ops.mkldnn._linear_pointwise.default
    return {
        "plain": lambda: [
            torch.nn.functional.linear(rows[weight.shape[1]], weight) for weight in weights
        ],
        "packed": lambda: [
            multiply(rows[weight.shape[1]], other, None, "none", [], "")
            for weight, other in zip(weights, packed)
        ],
        "captured": lambda: [one(rows[one.weights[0].shape[1]][None]) for one in captured],
        "small pages": lambda: [one(rows[one.weights[0].shape[1]][None]) for one in small_pages],
        "bfloat16": lambda: [
            multiply(rows[weight.shape[1]].bfloat16(), other, None, "none", [], "").float()
            for weight, other in zip(weights, narrow)
        ],
        "int8": lambda: [
            torch._weight_int8pack_mm(rows[weight.shape[1]].bfloat16(), *other).float()
            for weight, other in zip(weights, int8)
        ],
    }


def new_draft(family: str, target: Target) -> Any:
    draft = FAMILIES[family].create(DRAFTS[family], target, seed=0)
    return draft.to(device=target.device, dtype=target.dtype).eval()


def draft_variants(
    family: str, own: Target, captured: Target, k: int, temperature: int
) -> Variants:
    drafts = {"own": new_draft(family, own)}
    for name in ("many calls", "captured"):
        drafts[name] = new_draft(family, captured)
        capture_forwards(captured, drafts[name])
    drafts["many calls"].one_chain = None  # the same kernels, each called from Python
    return {name: draft_round(draft, own, k, temperature) for name, draft in drafts.items()}


def draft_round(drafter: Any, target: Target, k: int, temperature: int) -> Callable[[], Any]:
    """After a round that committed two tokens; one row."""
    num_new = 3
    inputs = DraftInputs(
        tokens=torch.full((num_new,), 7),
        starts=torch.tensor([CONTEXT]),
        lengths=torch.tensor([num_new]),
        taps=torch.randn(num_new - 1, len(drafter.taps) * target.hidden_size, dtype=target.dtype)
        if drafter.taps
        else None,
        num_draft=torch.tensor([k]),
        sampling=SamplingRows.of([float(temperature)]),
        seeds=torch.tensor([0]),
        pool=drafter.new_pool(CONTEXT // BLOCK_SIZE + 4, BLOCK_SIZE, target.device, target.dtype),
        block_tables=torch.arange(1, CONTEXT // BLOCK_SIZE + 3)[None],
        histories=[[7] * (CONTEXT + num_new)],
    )
    return lambda: drafter.propose(inputs)


def sampling_variants(vocab_size: int, k: int) -> dict[str, Variants]:
    """Verification of a drafted chain and a draw of one token at temperature 1, from raw logits."""
    found: dict[str, Variants] = {}
    for label, rows in (
        ("", SamplingRows.of([1.0])),
        (", top-p", SamplingRows.of([1.0], top_p=[0.9])),
    ):
        verify, drawn = sampled(vocab_size, k, rows)
        found |= {f"verification, k = {k}{label}": verify, f"draw of a token{label}": drawn}
    return found


def sampled(vocab_size: int, k: int, rows: SamplingRows) -> tuple[Variants, Variants]:
    """In one call, by operations and calls of kernels, and as before these: the reference, and
    torch's operations for the noise of a vocabulary."""
    generator = torch.Generator().manual_seed(0)
    p = 3 * torch.randn(k + 1, vocab_size, generator=generator)
    raw = p[:k] + torch.randn(k, vocab_size, generator=generator) / 2
    seeds, positions = torch.tensor([0]), torch.tensor([CONTEXT])
    drawn = draw_torch(raw, rows.repeat([k]), seeds, positions + torch.arange(k), Purpose.DRAFT)
    drafts = Drafts(drawn.tokens[None], torch.tensor([k]), drawn.logits[None])
    repeated, one = rows.repeat([k + 1]), (p[:1], rows, seeds, positions, Purpose.BONUS)

    def by_operations(impl: str) -> Any:
        return verify_chain(process(p, repeated), *drafts[:3], seeds, positions, impl=impl)

    verify: Variants = {
        "captured": partial(verify_chain_compiled, p, rows, drafts, [(0, CONTEXT)]),
        "many calls": partial(by_operations, "auto"),
        "unfused": partial(with_torchs_noise, partial(by_operations, "torch")),
    }
    return verify, {
        "captured": partial(draw, *one),
        "many calls": partial(draw_torch, *one),
        "unfused": partial(with_torchs_noise, partial(draw_torch, *one)),
    }


def with_torchs_noise(run: Callable[[], Any]) -> Any:
    # Not `patch.object`, whose own time would count.
    kernel, random_streams.compiled_uniforms = random_streams.compiled_uniforms, no_kernel
    try:
        return run()
    finally:
        random_streams.compiled_uniforms = kernel


def no_kernel(keys: torch.Tensor, offsets: torch.Tensor) -> None: ...


def show(report: dict[str, Any]) -> None:
    kinds = list(next(iter(report["passes"].values())))
    print(f"{'least ms':28}" + "".join(f"{kind:>14}" for kind in (*kinds, "own/captured")))
    for part in ("passes", "draft_rounds", "sampling"):
        for name, row in report[part].items():
            cells = [row[kind]["least_ms"] if kind in row else None for kind in kinds]
            ratio = row.get("own", row["captured"])["least_ms"] / row["captured"]["least_ms"]
            shown = "".join(f"{'-' if one is None else f'{one:.3f}':>14}" for one in cells)
            print(f"{name:28}{shown}{ratio:14.2f}")
    print(f"\n{'products, least ms':24}" + "".join(f"{name:>14}" for name in PRODUCTS))
    for part in ("matmuls", "draft_matmuls"):
        for name, row in report[part].items():
            shown = "".join(f"{row[kind]['least_ms']:14.3f}" for kind in PRODUCTS)
            print(f"{name if part == 'draft_matmuls' else 'target, ' + name:24}{shown}")
    for kind, taken_s in report["ready_s"].items():
        print(f"{kind}: ready after {taken_s} s")
    print(f"load average before: {report['load_average_before']:.1f}")


if __name__ == "__main__":
    main()
