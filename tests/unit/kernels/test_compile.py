"""Triton kernels compile as they are launched for sm_80, sm_90 and sm_100, without such a device,
and fit: interpretation alone would show neither a type error nor a tile that is too large."""

from __future__ import annotations

import json
import os
import subprocess
import sys

import pytest

from tests.unit.kernels.launches import LIMITS

# Minutes on a machine that is busy.
pytestmark = pytest.mark.timeout(3600)
MOST_REGISTERS = 255
# The compiler sometimes stores up to four registers rather than let fewer programs share a
# multiprocessor.
FEW_BYTES = 16
# Steps between products, several of whose programs share a multiprocessor and exchange sums alone.
STEPS = {"_normalise", "_rotate", "_gate"}
MOST_REGISTERS_OF_STEPS, MOST_SHARED_BYTES_OF_STEPS = 48, 4096
# Of draws and verification, which store none but for `EXCEPTIONS`. A multiprocessor has room for two
# programs of `_narrow`, three of `_finish`, four of `_walk`, five of `_bound`, for 32 warps of `row_stats` and `race`, 24 of
# `_mass`.
LEAN = {"_scale": 80, "_bound": 96, "_narrow": 64, "_finish": 168, "_score": 80, "_walk": 64}
LEAN |= {"row_stats": 64, "race": 64, "_mass": 72}
# Eight registers at most, in prompts and in a dtype that no device serves; half as many keys a step
# would mend them, which no device has timed. And those of a walk's decision, which one program of a
# pass takes; its loops over the vocabulary store none. `_finish` would need more registers there
# than let three of its programs run.
EXCEPTIONS = {
    ("_attend of 80 bfloat16 prompt tree", 80): 32,
    ("_attend of 96 float32 decode", 80): 24,
    ("_attend of 256 bfloat16 prompt tree window softcap sinks", 90): 32,
    ("_finish of draw bfloat16 32000", 100): 48,
} | {
    (f"_walk of tree {dtype} 24 drafts", capability): size
    for dtype in ("bfloat16", "float16", "float32")
    for capability, size in ((90, 16), (100, 56))
}


def compiled(which: str) -> list[dict]:
    """What a process that does not interpret tells. Triton keeps what it has compiled by the kernel's
    source, the launch and its own version."""
    environment = os.environ | {"TRITON_INTERPRET": "0"}
    command = [sys.executable, "-m", "tests.unit.kernels.compile_kernels", which]
    done = subprocess.run(command, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout[-1000:] + done.stderr[-3000:]
    return [json.loads(line) for line in done.stdout.splitlines()]


def fits(told: dict) -> bool:
    name, capability = told["label"].partition(" ")[0], told["capability"]
    if name in STEPS:
        small = told["shared"] <= MOST_SHARED_BYTES_OF_STEPS
        return small and told["registers"] <= MOST_REGISTERS_OF_STEPS and not told["stack"]
    few = EXCEPTIONS.get((told["label"], capability), 0 if name in LEAN else FEW_BYTES)
    small = told["shared"] <= LIMITS[capability].shared_bytes
    most = LEAN.get(name, MOST_REGISTERS)
    return small and told["registers"] <= most and told["stack"] <= few


def misfits(variants: list[dict]) -> list[dict]:
    return [told for told in variants if not fits(told)]


def test_what_is_served_most_compiles_and_fits() -> None:
    variants = compiled("few")
    assert len(variants) >= 3
    assert misfits(variants) == []
    assert max(told["stack"] for told in variants) == 0


@pytest.fixture(scope="module")
def counts() -> dict[str, dict[str, int]]:
    [found] = compiled("count")
    return found


@pytest.mark.long
def test_a_server_meets_few_variants_of_attention(counts: dict[str, dict[str, int]]) -> None:
    """The first pass of each kind waits a second for the compiler."""
    assert counts["alike"]["_attend"] <= 24
    assert counts["with windows"]["_attend"] <= 48


@pytest.mark.long
def test_a_server_meets_few_variants_of_verification(counts: dict[str, dict[str, int]]) -> None:
    """Any number of requests up to 64 and any k up to 7: with and without draft distributions."""
    rounds = counts["rounds"]
    assert rounds["row_stats"] == rounds["race"] == 2
    assert sum(rounds.values()) <= 14, rounds


@pytest.mark.long
@pytest.mark.parametrize("capability", LIMITS)
def test_every_variant_compiles_and_fits(capability: int) -> None:
    variants = compiled(str(capability))
    assert len(variants) > 200
    assert misfits(variants) == []


def test_a_misfit_is_found() -> None:
    at_most = {"label": "", "registers": 255, "stack": 0, "shared": 166_912, "capability": 80}
    assert misfits([at_most]) == []
    for change in ({"stack": 24}, {"shared": 166_913}, {"registers": 256}):
        assert misfits([at_most | change]) == [at_most | change]
    for name in ("_gate of steps", "_scale of draw"):
        assert misfits([at_most | {"label": name, "stack": 8, "registers": 40, "shared": 0}])
    for name in ("_narrow of draw", "_walk of tree", "race of chain"):
        assert misfits([at_most | {"label": name, "registers": 72}])
