"""Compiles the steps between products for three generations of GPUs at the sizes of real models,
asserts that none of them spills registers or takes many, and prints what they take; run by
test_compile_forward.py in a process that does not interpret."""

from __future__ import annotations

import re
import subprocess
import tempfile
from typing import Any

import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from draftsmith.kernels.forward import gate_triton, norm_triton, rotation_triton
from draftsmith.kernels.forward.norm_triton import Norm, norm_constants, sizes

ARCHITECTURES = (80, 90, 100)
MOST_REGISTERS = 48  # of a thread
MOST_SHARED_BYTES = 4096
# Hidden size, feed-forward size, heads, key heads: 1B, 8B and 70B of one family.
SHAPES = ((2048, 8192, 32, 8), (4096, 14336, 32, 8), (8192, 28672, 64, 8))
HEAD_DIM = 128
LLAMA, GEMMA = Norm(0.0), Norm(0.0, 1.0, True)
TENSORS = ("x", "residual", "weight", "total", "out", "factor", "query", "key", "value", "cosine",
           "sine", "query_weight", "key_weight", "turned", "keys", "values")  # fmt: skip
TYPES = {"eps": "fp32", "slots": "*i64"}


def resources(kernel: Any, constants: dict[str, Any], *, architecture: int, dtype: str) -> str:
    """What the kernel takes of a multiprocessor, as cuobjdump tells it."""
    constants = dict(constants)
    options = {"num_warps": constants.pop("num_warps", 4)}
    types = dict.fromkeys(TENSORS, dtype) | TYPES
    signature = {
        name: "constexpr" if name in constants else types.get(name, "i32")
        for name in kernel.arg_names
    }
    places = {(kernel.arg_names.index(name),): value for name, value in constants.items()}
    # Tensors and strides of real models are aligned, and the launcher says so.
    aligned = {
        (index,): [["tt.divisibility", 16]]
        for index, name in enumerate(kernel.arg_names)
        if name not in constants and name != "eps"
    }
    source = ASTSource(fn=kernel, signature=signature, constexprs=places, attrs=aligned)
    target = GPUTarget("cuda", architecture, 32)
    cubin = triton.compile(source, target=target, options=options).asm["cubin"]
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        command = [triton.knobs.nvidia.cuobjdump.path, "--dump-resource-usage", file.name]
        shown = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    return shown.strip().splitlines()[-1].strip()


def norm(width: int, norm: Norm, *, residual: bool) -> dict[str, Any]:
    flags = {"HEADS": 1, "HAS_RESIDUAL": residual, "HAS_WEIGHT": True}
    return {**flags, **norm_constants(norm), **sizes(width)}


def rotation(heads: int, kv_heads: int, norm: Norm | None) -> dict[str, Any]:
    dims = {"DIM": HEAD_DIM, "HALF": HEAD_DIM // 2, "VALUE_DIM": HEAD_DIM, "VALUE_WIDTH": HEAD_DIM}
    flags = {"HAS_NORM": norm is not None, **norm_constants(norm or LLAMA), "num_warps": 1}
    return {"HEADS": heads, "KV_HEADS": kv_heads, **dims, **flags}


def gate(width: int, activation: str) -> dict[str, Any]:
    return {"WIDTH": width, "BLOCK": gate_triton._BLOCK, "ACTIVATION": activation}


def variants() -> dict[str, tuple[Any, dict[str, Any], str]]:
    """Kernel, constants and type of each, by name."""
    found: dict[str, tuple[Any, dict[str, Any], str]] = {}
    for hidden, inner, heads, kv_heads in SHAPES:
        for name, kernel, constants in (
            ("norm", norm_triton._normalise, norm(hidden, LLAMA, residual=False)),
            ("sum and norm", norm_triton._normalise, norm(hidden, LLAMA, residual=True)),
            ("rotation and write", rotation_triton._rotate, rotation(heads, kv_heads, None)),
            ("silu gate", gate_triton._gate, gate(inner, "silu")),
        ):
            found[f"{name} {hidden}"] = (kernel, constants, "*bf16")
    hidden, inner, heads, kv_heads = SHAPES[-1]
    rest = {
        "sum and offset norm": (norm_triton._normalise, norm(hidden, GEMMA, residual=True)),
        "norms, rotation and write": (rotation_triton._rotate, rotation(heads, kv_heads, LLAMA)),
        "gelu gate": (gate_triton._gate, gate(inner, "gelu")),
        "gelu_tanh gate": (gate_triton._gate, gate(inner, "gelu_tanh")),
    }
    found |= {f"{name} {hidden}": (*pair, "*bf16") for name, pair in rest.items()}
    found["sum and norm 8192 float32"] = (*found["sum and norm 8192"][:2], "*fp32")
    return found


def main() -> int:
    done = 0
    for name, (kernel, constants, dtype) in variants().items():
        for architecture in ARCHITECTURES:
            taken = resources(kernel, constants, architecture=architecture, dtype=dtype)
            print(f"sm_{architecture} {name}: {taken}")
            used = {kind: int(number) for kind, number in re.findall(r"\b([A-Z]+):(\d+)", taken)}
            assert used["STACK"] == used["LOCAL"] == 0, "registers are spilled"
            assert used["REG"] <= MOST_REGISTERS, "fewer programs share a multiprocessor"
            assert used["SHARED"] <= MOST_SHARED_BYTES, "a step exchanges sums alone"
            done += 1
    return done


if __name__ == "__main__":
    print(main())
