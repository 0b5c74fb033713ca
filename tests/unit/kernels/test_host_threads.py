"""Loops that the compiled kernels share out over threads."""

from __future__ import annotations

import ctypes
import shutil
import subprocess
import sys
import threading
from pathlib import Path

import numpy as np
import pytest

from draftsmith.kernels.host_compiler import COMPILERS, HEADERS, compiled

pytestmark = pytest.mark.skipif(not any(map(shutil.which, COMPILERS)), reason="no C++ compiler")
# Adds 1 to each of `counts`; from one thread's view of a loop, how many others were seen at it.
SOURCE = f"""
#include "{HEADERS[0]}"
extern "C" void count(int32_t* counts, int64_t number, int threads) {{
  each(number, threads, [=](int64_t i) {{ counts[i]++; }});
}}
// Returns whether two threads were at the loop at once: each waits for the other, 5 s at most.
extern "C" int meet(int threads) {{
  std::atomic<int> here{{0}};
  each(2, threads, [&](int64_t) {{
    here++;
    for (int i = 0; i < 5000 && here < 2; i++) std::this_thread::sleep_for(std::chrono::milliseconds(1));
  }});
  return here == 2;
}}
"""
# A child that a process with threads at work has forked has none of them.
FORK = """
import ctypes, os, sys
import numpy as np
library, counts = ctypes.CDLL(sys.argv[1]), np.zeros(1000, np.int32)
for _ in range(2):
    library.count(ctypes.c_void_p(counts.ctypes.data), ctypes.c_int64(1000), 4)
    if child := os.fork():
        break
sys.exit(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) if child else int(counts.min() != 2))
"""


@pytest.fixture
def library(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> ctypes.CDLL:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    (tmp_path / "loops.cpp").write_text(SOURCE, encoding="utf-8")
    made = compiled.__wrapped__(tmp_path / "loops.cpp")
    assert made is not None
    return made


def count(library: ctypes.CDLL, counts: np.ndarray, threads: int) -> None:
    library.count(ctypes.c_void_p(counts.ctypes.data), ctypes.c_int64(len(counts)), threads)


@pytest.mark.parametrize("threads", [1, 2, 3, 16])
def test_each_step_is_taken_once(library: ctypes.CDLL, threads: int) -> None:
    for number in (0, 1, 2, 15, 17, 1000):
        counts = np.zeros(number, np.int32)
        for _ in range(50):
            count(library, counts, threads)
        assert (counts == 50).all()


def test_several_threads_are_at_a_loop(library: ctypes.CDLL) -> None:
    assert library.meet(2)


def test_callers_at_once_and_other_numbers_of_threads(library: ctypes.CDLL) -> None:
    found = np.zeros((4, 300), np.int32)
    callers = [
        threading.Thread(
            target=lambda i=i: [count(library, found[i], 2 + n % 5) for n in range(2000)]
        )
        for i in range(4)
    ]
    for caller in callers:
        caller.start()
    for caller in callers:
        caller.join()
    assert (found == 2000).all()


def test_a_forked_process_computes(library: ctypes.CDLL) -> None:
    done = subprocess.run([sys.executable, "-c", FORK, library._name], timeout=60, check=False)
    assert done.returncode == 0
