"""Compiles the Triton kernels ahead of time and prints how many; run by test_compile.py in a
process that does not interpret."""

from __future__ import annotations

from typing import Any

import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from draftsmith.kernels.verify import block_triton as verify_block_triton
from draftsmith.kernels.verify import chain_triton as verify_triton
from draftsmith.kernels.verify import rows_triton as rows_triton
from draftsmith.kernels.verify import tree_triton as verify_tree_triton

HOPPER = GPUTarget("cuda", 90, 32)
F32, I64, I32 = "*fp32", "*i64", "i32"

STATS = {"lengths": I64, "maxima": F32, "sums": F32}
DISTRIBUTIONS = {"p_maxima": F32, "p_sums": F32, "q_maxima": F32, "q_sums": F32}
REQUESTS = {
    "draft_tokens": I64,
    "lengths": I64,
    "first_rows": I64,
    "seeds": I64,
    "positions": I64,
    "accepted": I64,
}
CHAIN = {
    **DISTRIBUTIONS,
    **REQUESTS,
    "p_logits": F32,
    "q_logits": F32,
    "scores": "*fp64",
    "winners": "*i32",
}
TREE = {
    "tokens": I64,
    "parents": I64,
    "nodes": I64,
    "drafts": I64,
    "stands": I64,
    "scales": F32,
    "q_rows": I64,
}


def check(
    kernel: Any, pointers: dict[str, str], constants: dict[str, Any], *, num_warps: int = 4
) -> int:
    """Arguments that are neither pointers nor constants are int32."""
    signature = {
        name: "constexpr" if name in constants else pointers.get(name, I32)
        for name in kernel.arg_names
    }
    places = {(kernel.arg_names.index(name),): value for name, value in constants.items()}
    source = ASTSource(fn=kernel, signature=signature, constexprs=places)
    compiled = triton.compile(source, target=HOPPER, options={"num_warps": num_warps})
    return len(compiled.asm["cubin"]) > 0


def main() -> int:
    done = 0
    for grouped in (True, False):
        done += check(
            rows_triton.row_stats, {**STATS, "logits": "*bf16"}, {"GROUPED": grouped, "BLOCK": 4096}
        )
    emit = {
        "draft_tokens": I64,
        "accepted": I64,
        "scores": "*fp64",
        "winners": "*i32",
        "tokens": I64,
    }
    done += check(rows_triton.emit, emit, {"COLUMNS": 8, "BLOCKS": 32})
    return done + chain() + block() + tree()


def chain() -> int:
    pointers = {
        **REQUESTS,
        "logits": "*bf16",
        "q_logits": F32,
        "temperatures": F32,
        "owned": I64,
        "maxima": F32,
        "sums": F32,
        "places": "*i32",
        "scores": "*fp64",
        "winners": "*i32",
        "counters": "*i32",
        "verdicts": I64,
    }
    sizes = {"BLOCK": 4096, "BLOCKS": 32, "DEPTHS": 8, "REQUESTS": 4}
    # What is 1 is specialised to a constant by the launcher.
    alone = {
        **sizes, "BLOCKS": 1, "DEPTHS": 1, "REQUESTS": 0,
        "num_requests": 1, "num_draft": 1, "num_blocks": 1,
    }  # fmt: skip
    return sum(
        check(verify_triton._verify, pointers, {"HAS_Q": has_q, **constants}, num_warps=8)
        for has_q in (True, False)
        for constants in (sizes, alone)
    )


def block() -> int:
    pointers = {**CHAIN, "reaches": F32, "masses": F32, "lasts": I64}
    blocks = {"BLOCKS": 32}
    done = sum(
        check(kernel, pointers, blocks)
        for kernel in (verify_block_triton._reach, verify_block_triton._decide)
    )
    return done + sum(
        check(kernel, pointers, {**blocks, "BLOCK": 4096})
        for kernel in (verify_block_triton._mass, verify_block_triton._race)
    )


def tree() -> int:
    done = 0
    for has_q in (True, False):
        pointers = {**CHAIN, **TREE, "p_logits": "*bf16", "q_logits": "*bf16"}
        done += check(
            verify_tree_triton._walk,
            pointers,
            {"HAS_Q": has_q, "COLUMNS": 64, "BLOCK": 4096},
            num_warps=16,
        )
        done += check(
            verify_tree_triton._race, pointers, {"HAS_Q": has_q, "BLOCK": 4096}, num_warps=8
        )
    return done


if __name__ == "__main__":
    print(main())
