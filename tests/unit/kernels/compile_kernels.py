"""Compiles Triton kernels ahead of time exactly as their launchers would, without a device, and
prints a line of JSON for each variant; run by test_compile.py in a process that does not
interpret.

    python -m tests.unit.kernels.compile_kernels few|80|90|100    # each variant and its resources
    python -m tests.unit.kernels.compile_kernels count           # variants that a server meets
"""

from __future__ import annotations

import json
import re
import subprocess
import sys
import tempfile
from collections.abc import Iterable
from pathlib import Path
from typing import Any, NamedTuple

import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource, make_backend
from triton.runtime.jit import create_function_from_signature

from tests.unit.kernels.compiled_cases import CASES, FEW, SERVED, Case, served_passes, served_rounds
from tests.unit.kernels.launches import Launch, recorded

_CUOBJDUMP = Path(triton.__file__).parent / "backends/nvidia/bin/cuobjdump"


class _Pointer:
    """A tensor as Triton looks at one. Memory that torch allocates is aligned."""

    def __init__(self, tensor: torch.Tensor):
        self.dtype = tensor.dtype
        self._offset = tensor.storage_offset() * tensor.element_size()

    def data_ptr(self) -> int:
        return self._offset


class Variant(NamedTuple):
    """What makes Triton compile a kernel anew."""

    name: str
    source: Any
    options: Any
    capability: int

    @property
    def key(self) -> tuple[object, ...]:
        source = self.source
        parts = (source.signature, source.constants, source.attrs, vars(self.options))
        return (self.name, self.capability, *(repr(sorted(part.items())) for part in parts))


def variant_of(launch: Launch, capability: int) -> Variant:
    kernel = launch.kernel
    backend = make_backend(GPUTarget("cuda", capability, 32))
    binder = create_function_from_signature(kernel.signature, kernel.params, backend)
    args = [_Pointer(arg) if isinstance(arg, torch.Tensor) else arg for arg in launch.args]
    given = {"debug": False, **launch.options}
    bound, specialization, rest = binder(*args, **given)
    options, signature, constants, attributes = kernel._pack_args(
        backend, given, bound, specialization, rest
    )
    source = ASTSource(kernel, signature, constants, attributes)
    return Variant(kernel.fn.__name__, source, options, capability)


def variants_of(cases: Iterable[Case], capability: int) -> list[tuple[str, Variant]]:
    """Labelled by the first case that launches each; those of equal keys are one."""
    found: dict[tuple[object, ...], tuple[str, Variant]] = {}
    for case in cases:
        with recorded(capability) as launches:
            case.launch()
        for launch in launches:
            variant = variant_of(launch, capability)
            found.setdefault(variant.key, (f"{variant.name} of {case.label}", variant))
    return list(found.values())


def resources_of(variant: Variant) -> dict[str, int]:
    """Registers of a thread, bytes of its stack (what did not fit), shared memory of a program."""
    target = GPUTarget("cuda", variant.capability, 32)
    compiled = triton.compile(variant.source, target=target, options=vars(variant.options))
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(compiled.asm["cubin"])
        file.flush()
        command = [_CUOBJDUMP, "-res-usage", file.name]
        told = subprocess.run(command, capture_output=True, text=True, check=True)
    line = re.search(rf"Function {variant.name}:\s*(.*)", told.stdout + told.stderr)
    assert line is not None, told.stdout + told.stderr
    usage = {name: int(size) for name, size in re.findall(r"(REG|STACK):(\d+)", line[1])}
    shared = compiled.metadata.shared
    return {"registers": usage["REG"], "stack": usage["STACK"], "shared": shared}


def count() -> dict[str, dict[str, int]]:
    """Variants of each kernel of attention in all passes of a server, and of each kernel of
    verification in all its rounds."""
    cases: dict[str, Iterable[Case]] = {
        layers: served_passes(shape, of_layers) for layers, (shape, of_layers) in SERVED.items()
    }
    found = {}
    for what, served in (cases | {"rounds": served_rounds()}).items():
        names = [variant.name for _, variant in variants_of(served, 90)]
        found[what] = {name: names.count(name) for name in sorted(set(names))}
    return found


def main(which: str) -> None:
    if which == "count":
        print(json.dumps(count()))
        return
    if which == "few":
        chosen = [(case, 90 if index else 80) for index, case in enumerate(FEW)]
    else:
        chosen = [(case, int(which)) for case in CASES]
    for capability in sorted({capability for _, capability in chosen}):
        cases = [case for case, of in chosen if of == capability]
        for label, variant in variants_of(cases, capability):
            told = {"label": label, "capability": capability, **resources_of(variant)}
            print(json.dumps(told), flush=True)


if __name__ == "__main__":
    main(sys.argv[1])
