"""Memory in huge pages: where the system gives them, what it holds, and that it is given back."""

from __future__ import annotations

import mmap
from pathlib import Path

import pytest
import torch

from draftsmith.kernels import host_memory
from draftsmith.kernels.host_memory import PAGE_BYTES, empty_in_huge_pages
from draftsmith.kernels.products.few_rows import few_rows

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


@given
def test_weights_of_few_rows_lie_in_them() -> None:
    before = own("AnonHugePages")
    weight = torch.ones(4096, 1024)
    packed = few_rows(weight, None)
    if packed is None:
        pytest.skip("there is no C++ compiler")
    assert own("AnonHugePages") - before >= 8 * PAGE_BYTES
    assert packed(torch.ones(1, 1024)).eq(1024).all()


@given
def test_small_weights_share_pages_one_behind_the_other_until_the_last_is_gone() -> None:
    empty_in_huge_pages(PAGE_BYTES, torch.float32).fill_(1).sum()  # what torch loads at first use
    before = own("AnonHugePages")
    counts = [PAGE_BYTES // 4 - 3] * 12  # float32, nearly half of what would be given alone
    found = [
        empty_in_huge_pages(count, torch.float32).fill_(index) for index, count in enumerate(counts)
    ]
    assert own("AnonHugePages") - before >= 12 * PAGE_BYTES
    assert all(one.eq(index).all() for index, one in enumerate(found))
    assert all(one.data_ptr() % 64 == 0 for one in found)
    assert found[1].data_ptr() - found[0].data_ptr() == PAGE_BYTES
    del found[1:]
    assert found[0].eq(0).all()
    del found
    # The kernel makes huge pages of other memory of this process meanwhile.
    assert own("AnonHugePages") - before < 6 * PAGE_BYTES


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
