"""Page faults of memory that is freed and taken again, counted in processes of their own."""

from __future__ import annotations

import ctypes
import mmap
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from draftsmith.kernels import host_memory
from draftsmith.kernels.host_memory import PAGE_BYTES, empty_in_huge_pages

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


# Huge pages


SETTING = Path("/sys/kernel/mm/transparent_hugepage/enabled")
given = pytest.mark.skipif(
    not SETTING.exists() or "[never]" in SETTING.read_text(), reason="a system without huge pages"
)


def own(name: str) -> int:
    """Bytes of this process."""
    for line in Path("/proc/self/smaps_rollup").read_text().splitlines():
        if line.startswith(f"{name}:"):
            return int(line.split()[1]) << 10
    raise AssertionError(f"/proc has no {name}")


@given
def test_whole_pages_are_huge_and_the_rest_is_not_taken_up() -> None:
    pages, rest = 6, 4096
    empty_in_huge_pages(PAGE_BYTES, torch.float32).fill_(1).sum()  # what torch loads at first use
    before = own("AnonHugePages"), own("Rss")
    found = empty_in_huge_pages((pages * PAGE_BYTES + rest) // 4, torch.float32).fill_(1)
    assert own("AnonHugePages") - before[0] == pages * PAGE_BYTES
    assert own("Rss") - before[1] < (pages + 0.5) * PAGE_BYTES
    assert found.sum() == len(found)
    del found
    assert own("AnonHugePages") == before[0]


@pytest.mark.parametrize("count", [0, 3, PAGE_BYTES // 2 - 1, PAGE_BYTES // 2, PAGE_BYTES + 5])
def test_any_number_is_given(count: int) -> None:
    found = empty_in_huge_pages(count, torch.bfloat16).fill_(2)
    assert found.shape == (count,) and found.dtype == torch.bfloat16
    assert found.float().sum() == 2 * count


def test_a_system_without_them_gives_ordinary_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    class Refused(mmap.mmap):
        def madvise(self, *arguments: int) -> None:
            raise OSError(22, "Invalid argument")

    monkeypatch.setattr(host_memory.mmap, "mmap", Refused)
    assert empty_in_huge_pages(PAGE_BYTES, torch.float32).fill_(3).eq(3).all()
    monkeypatch.delattr(host_memory.mmap, "MADV_HUGEPAGE")
    assert empty_in_huge_pages(PAGE_BYTES, torch.float32).fill_(4).eq(4).all()
