"""Ten minutes of 64 clients against a server process whose draft is replaced again and again: nothing
leaks, nothing is lost.

DRAFTSMITH_LOAD_MINUTES sets another length.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import httpx
import pytest
import torch
from safetensors.torch import load_file, save_file

from draftsmith.drafters import checkpoint, versions
from draftsmith.drafters.heads.eagle3 import Eagle3
from draftsmith.drafters.options import Eagle3Options
from draftsmith.drafters.target.target import Target
from tests.waiting import wait_until

MINUTES = float(os.environ.get("DRAFTSMITH_LOAD_MINUTES", "10"))
LEAST = 10 * MINUTES  # of everything that must have happened
NUM_CLIENTS = 64
CLIENTS = Path(__file__).with_name("load_clients.py")
# that take turns; each time round, the last one is published with a NaN, which a server must refuse
DRAFTS = 4
pytestmark = [pytest.mark.long, pytest.mark.timeout(60 * MINUTES + 600)]


class Publisher:
    """Publishes drafts in turn, one of them broken, until it is stopped."""

    def __init__(self, root: Path, target: Target, drafts: list[Eagle3], every_s: float):
        self.root, self.target, self.drafts, self.every_s = root, target, drafts, every_s
        self.num_published = 0
        self._stopping = threading.Event()
        self._thread = threading.Thread(target=self._run)

    def publish(self) -> None:
        versions.publish(
            self.root,
            self._save,
            family="eagle3",
            target=checkpoint.identity(self.target),
            parent=None,
            data_range={},
            gate={},
        )
        self.num_published += 1

    def _save(self, folder: Path) -> None:
        number = self.num_published % len(self.drafts)
        checkpoint.save(self.drafts[number], folder, self.target)
        if number == len(self.drafts) - 1:
            weights = load_file(folder / "model.safetensors")
            weights["fc.weight"][0, 0] = torch.nan
            save_file(weights, folder / "model.safetensors")

    def __enter__(self) -> Publisher:
        self._thread.start()
        return self

    def __exit__(self, *ignored: object) -> None:
        self._stopping.set()
        self._thread.join()

    def _run(self) -> None:
        while not self._stopping.wait(self.every_s):
            self.publish()


class MemoryLog:
    """The resident memory of a process, once a second."""

    def __init__(self, pid: int):
        self.pid = pid
        self.resident_bytes: list[int] = []
        self._stopping = threading.Event()
        self._thread = threading.Thread(target=self._run)

    def __enter__(self) -> MemoryLog:
        self._thread.start()
        return self

    def __exit__(self, *ignored: object) -> None:
        self._stopping.set()
        self._thread.join()

    def _run(self) -> None:
        while not self._stopping.wait(1.0):
            self.resident_bytes.append(
                int(Path(f"/proc/{self.pid}/statm").read_text().split()[1])
                * os.sysconf("SC_PAGE_SIZE")
            )

    def growth(self) -> float:
        """Of a line through the second half, as a share of the memory there: what was still growing
        by then."""
        settled = torch.tensor(
            self.resident_bytes[len(self.resident_bytes) // 2 :], dtype=torch.float64
        )
        time_s = torch.arange(len(settled), dtype=torch.float64)
        slope = torch.cov(torch.stack([time_s, settled]))[0, 1] / time_s.var()
        return float(slope * len(settled) / settled.mean())


@pytest.fixture
def drafts(tiny_target: Callable[..., str]) -> tuple[Target, list[Eagle3]]:
    target = Target.load(tiny_target("llama"))
    return target, [
        Eagle3.create(Eagle3Options(), target, seed=seed).eval() for seed in range(DRAFTS)
    ]


def run_clients(quiet_url: str, url: str, folder: Path) -> dict[str, Any]:
    job = folder / "job.json"
    job.write_text(
        json.dumps(
            {
                "quiet_url": quiet_url, "url": url, "num_clients": NUM_CLIENTS,
                "seconds": 60 * MINUTES,
            }
        )
    )  # fmt: skip
    finished = subprocess.run(
        [sys.executable, str(CLIENTS), str(job)], capture_output=True, text=True
    )
    assert finished.returncode == 0, finished.stderr[-8000:]
    return json.loads(finished.stdout)


def test_a_crowd_leaves_nothing_behind(
    start_server: Callable, drafts: tuple[Target, list[Eagle3]], tmp_path: Path
) -> None:
    alone = start_server("--max-batch", "1")
    publisher = Publisher(tmp_path / "versions", *drafts, every_s=max(2.0, MINUTES))
    publisher.publish()
    # Few blocks, so that requests are put back again and again.
    small = ["--max-batch", "16", "--block-size", "8", "--num-blocks", "40", "--max-length", "128"]
    server = start_server(
        "--versions",
        str(publisher.root),
        "--poll-s",
        "0.3",
        "--k",
        "auto",
        *small,
    )
    with publisher, MemoryLog(server.process.pid) as memory:
        seen = run_clients(alone.url, server.url, tmp_path)
    kinds = ("running", "waiting")
    wait_until(lambda: not any(server.metric(f"vllm:num_requests_{kind}") for kind in kinds), 120)
    print(
        seen,
        f"{publisher.num_published} versions, memory {memory.growth():+.2%} of "
        f"{memory.resident_bytes[-1] >> 20} MiB",
    )
    check_answers(seen)
    check_counters(server, seen, publisher)
    assert memory.growth() < 0.03


def check_answers(seen: dict[str, Any]) -> None:
    assert min(seen["ends"][end] for end in ("complete", "left", "stopped", "greedy")) > LEAST, seen
    # Rounding may decide a few of them; more would hide something else.
    assert seen["ends"].get("near", 0) <= 0.01 * seen["ends"]["greedy"]


def check_counters(server: Any, seen: dict[str, Any], publisher: Publisher) -> None:
    # Blocks that the prefix cache keeps have no owner and count as free.
    assert server.metric("vllm:kv_cache_usage_perc") == 0
    for name in (
        "vllm:num_preemptions",
        "vllm:prefix_cache_hits",
        "vllm:spec_decode_num_draft_tokens",
    ):
        assert server.metric(f"{name}_total") > LEAST, name
    # Whoever left before the server had read the request was never admitted.
    ended = server.labelled("vllm:request_success_total", "finished_reason")
    assert ended["error"] == 0 and sum(ended.values()) <= seen["num_choices"]
    assert ended["stop"] + ended["length"] >= seen["ends"]["complete"] and ended["abort"] > 0
    assert publisher.num_published > len(publisher.drafts)
    broken = publisher.num_published // len(publisher.drafts)
    assert server.metric("draftsmith_swaps_refused_total") >= broken - 1
    assert 0 < server.metric("draftsmith_swaps_total") <= publisher.num_published - broken
    assert server.metric("draftsmith_fallbacks_total") == 0
    assert httpx.get(f"{server.url}/health").status_code == 200
    assert httpx.get(f"{server.url}/load").json() == {"server_load": 0}
    log = server.log.read_text()
    assert "a round failed" not in log and "Traceback" not in log, log[-4000:]
