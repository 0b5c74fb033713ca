"""Every Triton kernel compiles to a cubin for a Hopper GPU, without one: interpretation alone would
not show a type error."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

# Minutes on a machine that is busy.
pytestmark = pytest.mark.timeout(900)
# The scripts, and how many variants each of them compiles.
VARIANTS = {"compile_kernels": 15, "compile_divergence": 11, "compile_attention": 6}
ALL = """
import importlib, sys
for name in sys.argv[1:]:
    print(name, importlib.import_module(name).main(), flush=True)
"""


@pytest.fixture(scope="module")
def compiled(tmp_path_factory: pytest.TempPathFactory) -> subprocess.CompletedProcess[str]:
    """One process that does not interpret."""
    places = [str(Path(__file__).parent), *filter(None, [os.environ.get("PYTHONPATH")])]
    environment = os.environ | {
        "TRITON_INTERPRET": "0",
        "TRITON_CACHE_DIR": str(tmp_path_factory.mktemp("cubins")),
        "PYTHONPATH": os.pathsep.join(places),
    }
    command = [sys.executable, "-c", ALL, *VARIANTS]
    return subprocess.run(command, env=environment, capture_output=True, text=True, timeout=880)


@pytest.mark.parametrize("script", VARIANTS)
def test_kernels_compile_ahead_of_time(
    script: str, compiled: subprocess.CompletedProcess[str]
) -> None:
    assert f"{script} {VARIANTS[script]}" in compiled.stdout.splitlines(), (
        compiled.stdout + compiled.stderr[-3000:]
    )
