"""How often threads go to sleep between regions, counted in a process of its own."""

from __future__ import annotations

import ctypes
import os
import subprocess
import sys

import pytest

# Two threads compute, one after the other; the second one in many small regions.
COUNT = """
import os, threading
from pathlib import Path
import torch
from draftsmith.kernels.host_threads import release_threads

torch.set_num_threads(len(os.sched_getaffinity(0)))
numbers = torch.ones(1 << 17)

def switches():
    lines = [path.read_text() for path in Path("/proc/self/task").glob("*/status")]
    return sum(int(line.split("voluntary_ctxt_switches:")[1].split()[0]) for line in lines)

def regions():
    (numbers + 1)
    before = switches()
    for _ in range(1000):
        numbers + 1
    counted.append(switches() - before)

counted = []
numbers + 1
for release in (False, True):
    if release:
        assert release_threads()
    thread = threading.Thread(target=regions)
    thread.start()
    thread.join()
print(*counted)
"""


@pytest.mark.skipif(
    not hasattr(ctypes.CDLL(None), "GOMP_parallel") or not os.path.isdir("/proc/self/task"),
    reason="another OpenMP library than GNU's, or another system than Linux",
)
@pytest.mark.skipif((os.cpu_count() or 1) < 2, reason="one processor")
def test_released_threads_do_not_put_those_of_another_thread_to_sleep() -> None:
    environment = {name: value for name, value in os.environ.items() if "OMP" not in name}
    ran = subprocess.run(
        [sys.executable, "-c", COUNT], capture_output=True, text=True, check=True, env=environment
    )
    before, after = map(int, ran.stdout.split())
    assert before > 500, "nothing to mend: threads are to fall asleep in every region"
    assert after < 0.3 * before
