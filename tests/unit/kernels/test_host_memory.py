"""Page faults of memory that is freed and taken again, counted in processes of their own."""

from __future__ import annotations

import ctypes
import os
import subprocess
import sys

import pytest

from draftsmith.kernels import host_memory

MIB = 1 << 20
# Takes six blocks of 4 MiB at once, like the keys and values of a pass, and frees them all, again
# and again.
COUNT = """
import resource
from draftsmith.kernels.host_memory import keep_freed_memory

def faults():
    before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    for _ in range(20):
        blocks = [bytearray(4 << 20) for _ in range(6)]
        del blocks
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before

before = faults()
changed = keep_freed_memory()
faults()
print(int(changed), before, faults())
"""


@pytest.mark.skipif(
    not hasattr(ctypes.CDLL(None), "mallopt"), reason="another C library than glibc"
)
def test_freed_memory_is_used_again() -> None:
    pages = 20 * 6 * 4 * MIB // os.sysconf("SC_PAGE_SIZE")
    told = subprocess.run(
        [sys.executable, "-c", COUNT], capture_output=True, text=True, check=True
    ).stdout
    changed, before, after = map(int, told.split())
    assert changed
    assert before > 0.9 * pages, "nothing to mend: every page was to be faulted in each time"
    assert after < 0.01 * pages


@pytest.mark.parametrize(
    "name, value",
    [
        ("MALLOC_TRIM_THRESHOLD_", "131072"),
        ("GLIBC_TUNABLES", "glibc.malloc.trim_threshold=131072"),
    ],
)
def test_settings_of_the_user_stay(name: str, value: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(name, value)
    assert host_memory.keep_freed_memory() is False


def test_another_c_library_changes_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("MALLOC_TRIM_THRESHOLD_", "MALLOC_MMAP_THRESHOLD_", "GLIBC_TUNABLES"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(host_memory.ctypes, "CDLL", lambda name: object())
    assert host_memory.keep_freed_memory() is False
