"""The kernel benchmark as a user starts it, at sizes that say nothing but that it works."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

SCRIPT = Path(__file__).parents[2] / "scripts" / "bench_kernels.py"
TINY = ("--device", "cpu", "--quick", "--vocab", "64", "--seconds", "0", "--no-compile")
CASES = (
    "chain verification, V 64", "chain verification without q, V 64", "block verification, V 64", "tree verification, V 64",
    "filters, V 64", "sampling, V 64", "forward-kl, target logits given, V 64", "jsd, from both hidden states, V 64",
    "tv, from both hidden states, V 64", "lk-alpha, from both hidden states, V 64", "reverse-kl, from both hidden states, V 64",
    "paged attention",
)  # fmt: skip


@pytest.fixture(scope="module")
def report(tmp_path_factory: pytest.TempPathFactory) -> dict:
    out = tmp_path_factory.mktemp("bench") / "kernels.json"
    command = [sys.executable, str(SCRIPT), *TINY, "--out", str(out)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=240)
    assert done.returncode == 0, done.stderr[-3000:]
    for name in CASES:
        assert name in done.stdout
    assert "without liger: runs on CUDA only" in done.stdout and "profiler" not in done.stderr
    return json.loads(out.read_text())


def test_every_kernel_is_in_the_table_and_none_failed(report: dict) -> None:
    assert [case["name"] for case in report["cases"]] == list(CASES)
    for case in report["cases"]:
        for name, way in case["ways"].items():
            assert "failed" not in way, (case["name"], name)
            assert 0 < way["low_ms"] <= way["median_ms"] <= way["high_ms"] and way["runs"] >= 5
            assert (way["share_of_copy"] is None) == (case["floor_ms"] == 0)


def test_divergences_are_told_beside_the_reference_and_the_bare_products(report: dict) -> None:
    for case in report["cases"][6:11]:
        assert list(case["ways"]) == ["ours", "reference", "products"]
        assert case["ways"]["reference"]["peak_mib"] > 0


def test_the_report_says_where_it_was_measured(report: dict) -> None:
    assert report["copy_bytes_s"] > 1e8 and "load" in report["machine"] and "torch" in report["machine"]["versions"]
