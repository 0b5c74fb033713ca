"""Kernels and products by themselves: replays of graphs over three inputs in turn, so that neither the
host nor a cache is measured; divergences beside Liger's, runs in turns."""

from __future__ import annotations

import dataclasses
import statistics
import time
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
from torch.nn.functional import linear

from scripts.bench.device.machine import Machine
from scripts.bench.device.report import Report, free_memory, last_lines
from scripts.bench.device.shapes import TARGETS
from scripts.bench.kernels.case import Case, Sizes
from scripts.bench.kernels.cases import (
    FULL,
    QUICK,
    attention_case,
    block_case,
    chain_case,
    decide_case,
    draw_case,
    filter_case,
    tree_case,
)
from scripts.bench.kernels.divergence_cases import both_heads_case, given_logits_case

VOCABULARY, TINY_VOCABULARY = 128_256, 64
TURNS = 3  # inputs in turn
ROWS = (1, 4, 32)
RUNS = 20


def sizes_of(machine: Machine) -> Sizes:
    if machine.device.type == "cuda":
        return dataclasses.replace(FULL, vocabularies=(VOCABULARY,))
    return dataclasses.replace(QUICK, vocabularies=(TINY_VOCABULARY,), tokens=16, width=8)


def kernels(report: Report, item: str, machine: Machine) -> None:
    sizes, device = sizes_of(machine), machine.device
    vocabulary, dtype = sizes.vocabularies[0], torch.bfloat16
    makers: dict[str, Callable[[], Case]] = {
        "chain": lambda: chain_case(sizes, vocabulary, device, dtype),
        "block": lambda: block_case(sizes, vocabulary, device, dtype),
        "tree": lambda: tree_case(sizes, vocabulary, device, dtype),
        "filters": lambda: filter_case(sizes, vocabulary, device),
        "filtered draw": lambda: draw_case(sizes, vocabulary, device),
        "chain from logits": lambda: decide_case(sizes, vocabulary, device),
        "attention": lambda: attention_case(sizes, device),
    }
    for name, make in makers.items():
        cases = [make() for _ in range(TURNS)]
        way = "ours" if "ours" in cases[0].ways else "reference"
        report.note(
            item, **{name: timed([case.ways[way] for case in cases], machine, cases[0].floor_bytes)}
        )
        del cases
        free_memory()


def products(report: Report, item: str, machine: Machine) -> None:
    """`linear` at a round's rows, for each shape of a layer and the head."""
    names = ("1b", "8b") if machine.device.type == "cuda" else ("tiny",)
    for name in names:
        for label, (outputs, width) in matrices(TARGETS[name]).items():
            weights = [
                torch.randn(outputs, width, device=machine.device, dtype=torch.bfloat16)
                for _ in range(TURNS)
            ]
            for rows in ROWS:
                x = torch.randn(rows, width, device=machine.device, dtype=torch.bfloat16)
                calls = [partial(linear, x, weight) for weight in weights]
                key = f"{name} {label}, {rows} rows"
                report.note(item, **{key: timed(calls, machine, weights[0].nbytes)})
            del weights
            free_memory()


def matrices(shape: dict[str, Any]) -> dict[str, tuple[int, int]]:
    """[out, in] of a layer's packed products and of the head."""
    hidden, heads = shape["hidden_size"], shape["num_attention_heads"]
    head_dim = shape.get("head_dim", hidden // heads)
    packed = (heads + 2 * shape["num_key_value_heads"]) * head_dim
    inner = shape["intermediate_size"]
    return {
        "qkv": (packed, hidden), "o": (hidden, heads * head_dim), "gate and up": (2 * inner, hidden),
        "down": (hidden, inner), "head": (shape["vocab_size"], hidden),
    }  # fmt: skip


def timed(calls: Sequence[Callable[[], Any]], machine: Machine, floor_bytes: int) -> dict[str, Any]:
    """Milliseconds of a call and the share of them in which its bytes could be moved."""
    try:
        ms = replayed_ms(calls) if machine.device.type == "cuda" else called_ms(calls)
    except RuntimeError as error:
        return {"failed": last_lines(str(error))}
    return {"ms": round(ms, 5), "of_copy": round(1e3 * floor_bytes / machine.copy_bytes_s / ms, 3)}


def replayed_ms(calls: Sequence[Callable[[], Any]], rounds: int = 30) -> float:
    graphs, stream = [], torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for call in calls:
            for _ in range(2):
                call()
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph, stream=stream):
                call()
            graphs.append(graph)
    torch.cuda.current_stream().wait_stream(stream)
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    for graph in graphs:
        graph.replay()
    begin.record()
    for _ in range(rounds):
        for graph in graphs:
            graph.replay()
    end.record()
    end.synchronize()
    return begin.elapsed_time(end) / (rounds * len(graphs))


def called_ms(calls: Sequence[Callable[[], Any]]) -> float:
    begun_s = time.perf_counter()
    for call in calls:
        call()
    return 1e3 * (time.perf_counter() - begun_s) / len(calls)


def divergences(report: Report, item: str, machine: Machine) -> None:
    """Ours and Liger's in turns, nothing beside them."""
    sizes = sizes_of(machine)
    vocabulary = sizes.vocabularies[0]
    makers: dict[str, Callable[[], Case]] = {
        "forward-kl": lambda: given_logits_case(sizes, vocabulary, machine.device, Case),
        "reverse-kl": lambda: both_heads_case(
            "reverse-kl", sizes, vocabulary, machine.device, Case
        ),
    }
    for name, make in makers.items():
        case = make()
        ways = {way: case.ways[way] for way in ("ours", "products", "liger") if way in case.ways}
        times: dict[str, list[float]] = {way: [] for way in ways}
        for _ in range(RUNS if machine.device.type == "cuda" else 2):
            for way, call in ways.items():
                times[way].append(once_ms(call, machine.device))
        report.note(
            item, **{name: {way: round(statistics.median(ms), 3) for way, ms in times.items()}}
        )
        del case, ways
        free_memory()


def once_ms(call: Callable[[], Any], device: torch.device) -> float:
    if device.type == "cuda":
        torch.cuda.synchronize()
    begun_s = time.perf_counter()
    call()
    if device.type == "cuda":
        torch.cuda.synchronize()
    return 1e3 * (time.perf_counter() - begun_s)
