"""Compiles the kernels of a draw ahead of time and prints what each variant takes; run by
test_compile_draw.py in a process that does not interpret.

Arguments: compute capabilities, then sizes of vocabularies, each separated by commas.
"""

from __future__ import annotations

import json
import re
import subprocess
import sys
import tempfile
from typing import Any

import triton
from triton import knobs
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from draftsmith.kernels.sampling import draw_triton
from draftsmith.kernels.sampling.draw_triton import BLOCK, GROUP

VECTORS = {
    "temperature": "*fp32",
    "top_k": "*i64",
    "top_p": "*fp64",
    "min_p": "*fp32",
    "seeds": "*i64",
    "positions": "*i64",
    "tokens": "*i64",
}
# Their addresses are multiples of 16.
ALIGNED = {
    "processed": "*fp32",
    "scores": "*fp32",
    "winners": "*i32",
    "maxima": "*fp32",
    "values": "*fp32",
    "ids": "*i32",
    "sizes": "*i32",
    "masses": "*fp32",
}


def compiled(
    kernel: Any, logits: str, constants: dict[str, Any], capability: int, launch: dict[str, int]
) -> dict[str, Any]:
    """Registers and bytes of the stack (where spills go) a thread, and shared memory."""
    aligned = {**ALIGNED, "logits": logits}
    pointers = {**VECTORS, **aligned}
    signature = {
        name: "constexpr" if name in constants else pointers.get(name, "i32")
        for name in kernel.arg_names
    }
    places = {(kernel.arg_names.index(name),): value for name, value in constants.items()}
    attributes = {
        (place,): [["tt.divisibility", 16]]
        for place, name in enumerate(kernel.arg_names)
        if name in aligned or name in ("stride", "num_tokens")
    }
    source = ASTSource(fn=kernel, signature=signature, constexprs=places, attrs=attributes)
    target = GPUTarget("cuda", capability, 32)
    binary = triton.compile(source, target=target, options=launch)
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(binary.asm["cubin"])
        file.flush()
        command = [knobs.nvidia.cuobjdump.path, "--dump-resource-usage", file.name]
        usage = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    found = dict(re.findall(r"\b(REG|STACK):(\d+)", usage))
    return {
        "kernel": kernel.__name__,
        "capability": capability,
        "registers": int(found["REG"]),
        "stack_bytes": int(found["STACK"]),
        "shared_bytes": binary.metadata.shared,
        "warps": launch["num_warps"],
    }


def variants(capability: int, num_tokens: int, logits: str) -> list[dict[str, Any]]:
    """Of filtered rows, and of a batch without filters where the vocabulary makes no difference."""
    num_blocks = triton.cdiv(num_tokens, BLOCK)
    blocks = triton.next_power_of_2(num_blocks)
    groups = triton.next_power_of_2(num_blocks * (BLOCK // GROUP))
    sizes = {"BLOCK": BLOCK, "GROUP": GROUP}
    wide = {**sizes, "FILTERED": True, "BLOCKS": blocks, "GROUPS": groups}
    part = {"DRAWN": True, "PART": max(draw_triton.TILE // blocks, 1)}
    plain = {**wide, "FILTERED": False}
    scale = [{**sizes, "FILTERED": filtered, "DRAWN": True} for filtered in (True, False)]
    eight, filtering = {"num_warps": 8}, draw_triton.FILTERING
    cases = [(draw_triton._scale, constants, eight) for constants in scale]
    cases += [(draw_triton._narrow, constants, eight) for constants in (wide, plain)]
    cases += [
        (draw_triton._finish, {**wide, **part, "DRAWN": drawn}, filtering)
        for drawn in (True, False)
    ]
    cases += [(draw_triton._finish, {**plain, **part}, {"num_warps": 1})]
    cases += [(draw_triton._score, {"BLOCK": BLOCK}, eight)]
    return [
        {"vocabulary": num_tokens, "logits": logits, "filtered": constants.get("FILTERED")}
        | {"drawn": constants.get("DRAWN")}
        | compiled(kernel, logits, constants, capability, launch)
        for kernel, constants, launch in cases
    ]


def main(logits: str, capabilities: list[int], sizes: list[int]) -> None:
    for num_tokens in sizes:
        for capability in capabilities:
            for variant in variants(capability, num_tokens, logits):
                print(json.dumps(variant), flush=True)


if __name__ == "__main__":
    main(sys.argv[1], *([int(part) for part in one.split(",")] for one in sys.argv[2:]))
