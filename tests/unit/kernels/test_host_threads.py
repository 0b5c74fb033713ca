"""Loops that the compiled kernels share out over threads."""

from __future__ import annotations

import ctypes
import shutil
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest

from draftsmith.kernels.host_compiler import COMPILERS, HEADERS, compiled

pytestmark = pytest.mark.skipif(not any(map(shutil.which, COMPILERS)), reason="no C++ compiler")
# `meet` returns 1 where two threads were at a loop at once: each waits for the other, 2 s at most.
SOURCE = f"""
#include "{HEADERS[0]}"
extern "C" void count(int32_t* counts, int64_t number, int threads) {{
  each(number, threads, [=](int64_t i) {{ counts[i]++; }});
}}
extern "C" int meet(int threads) {{
  std::atomic<int> here{{0}}, met{{0}};
  each(2, threads, [&](int64_t) {{
    here++;
    for (int i = 0; i < 2000 && here < 2; i++)
      std::this_thread::sleep_for(std::chrono::milliseconds(1));
    met += here == 2;
  }});
  return met == 2;
}}
"""
# A forked process has none of the threads of the one it comes from.
FORK = """
import ctypes, os, sys
library, counts = ctypes.CDLL(sys.argv[1]), (ctypes.c_int32 * 1000)()
library.count(counts, ctypes.c_int64(1000), 4)
if child := os.fork():
    sys.exit(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))
library.count(counts, ctypes.c_int64(1000), 4)
sys.exit(set(counts) != {2})
"""


@pytest.fixture(scope="module")
def library(tmp_path_factory: pytest.TempPathFactory) -> ctypes.CDLL:
    (source := tmp_path_factory.mktemp("loops") / "loops.cpp").write_text(SOURCE, encoding="utf-8")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("XDG_CACHE_HOME", str(source.parent))
        made = compiled(source)
    assert made is not None
    return made


@pytest.mark.parametrize("callers", [1, 4])
def test_each_step_is_taken_once(library: ctypes.CDLL, callers: int) -> None:
    def steps(number: int) -> np.ndarray:
        counts = np.zeros(number, np.int32)
        for i in range(1000):
            library.count(ctypes.c_void_p(counts.ctypes.data), ctypes.c_int64(number), 1 + i % 17)
        return counts

    with ThreadPoolExecutor(callers) as pool:
        for counts in pool.map(steps, (0, 1, 2, 15, 17, 300)):
            assert (counts == 1000).all()


def test_several_threads_are_at_a_loop(library: ctypes.CDLL) -> None:
    assert library.meet(2) and not library.meet(1)


def test_a_forked_process_computes(library: ctypes.CDLL) -> None:
    subprocess.run([sys.executable, "-c", FORK, library._name], timeout=60, check=True)
