"""The steps between products compile to cubins for three generations of GPUs, without one, fit and spill
no registers."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

VARIANTS = 51


# Half a minute, minutes on a machine that is busy.
@pytest.mark.long
@pytest.mark.timeout(600)
def test_steps_compile_ahead_of_time_without_spills(tmp_path: Path) -> None:
    environment = os.environ | {"TRITON_INTERPRET": "0", "TRITON_CACHE_DIR": str(tmp_path)}
    script = Path(__file__).with_name("compile_forward.py")
    done = subprocess.run(
        [sys.executable, script], env=environment, capture_output=True, text=True, timeout=580
    )
    assert done.stdout.splitlines()[-1:] == [str(VARIANTS)], done.stdout + done.stderr[-3000:]
