"""The kernels of a draw compile for three generations of GPUs without one, and spill nothing."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

SCRIPT = Path(__file__).with_name("compile_draw.py")
CAPABILITIES = (80, 90, 100)
# A multiprocessor of each of them has so many registers, a program so many bytes to share.
REGISTERS, SHARED_BYTES = 65_536, 160 << 10


def compiled(
    folder: Path, capabilities: tuple[int, ...], sizes: list[int], logits: str = "*bf16"
) -> list[dict[str, Any]]:
    """In a process that does not interpret."""
    environment = os.environ | {"TRITON_INTERPRET": "0", "TRITON_CACHE_DIR": str(folder)}
    arguments = [",".join(map(str, numbers)) for numbers in (capabilities, sizes)]
    finished = subprocess.run(
        [sys.executable, str(SCRIPT), logits, *arguments],
        env=environment,
        capture_output=True,
        text=True,
        timeout=880,
    )
    assert finished.returncode == 0, finished.stderr[-3000:]
    return [json.loads(line) for line in finished.stdout.splitlines()]


def check(variants: list[dict[str, Any]], count: int) -> None:
    assert len(variants) == count
    for variant in variants:
        assert variant["stack_bytes"] == 0, variant
        assert variant["registers"] * 32 * variant["warps"] <= REGISTERS, variant
        assert variant["shared_bytes"] <= SHARED_BYTES, variant


@pytest.mark.long
@pytest.mark.timeout(900)
def test_kernels_of_a_draw_compile_ahead_of_time(tmp_path: Path) -> None:
    check(compiled(tmp_path, CAPABILITIES, [151_936]), 24)


@pytest.mark.long
@pytest.mark.timeout(900)
def test_kernels_of_a_draw_compile_for_other_vocabularies(tmp_path: Path) -> None:
    check(compiled(tmp_path, CAPABILITIES, [32_000, 128_256]), 48)


@pytest.mark.long
@pytest.mark.timeout(900)
@pytest.mark.parametrize("logits", ["*fp16", "*fp32"])
def test_kernels_of_a_draw_compile_for_other_logits(logits: str, tmp_path: Path) -> None:
    check(compiled(tmp_path, CAPABILITIES, [151_936], logits), 24)
