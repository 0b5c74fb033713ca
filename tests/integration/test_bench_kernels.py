"""The kernel benchmark as a user starts it, at sizes that say nothing but that it works."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest

from scripts.paths import ROOT
from tests import forked

TINY = ("--device", "cpu", "--quick", "--vocab", "64", "--seconds", "0", "--no-compile")
VERIFICATIONS = [
    f"{way}, V 64" for way in ("chain verification", "block verification", "tree verification")
]
DRAWS = ("no filter", "top-k 50", "top-p 0.95")
DIVERGENCES = ("jsd", "tv", "lk-alpha", "reverse-kl", "ce")
CASES = [
    *VERIFICATIONS, *(f"{name}, bfloat16" for name in VERIFICATIONS),
    "chain verification from logits, V 64", *(f"draw, {what}, V 64" for what in DRAWS),
    "forward-kl, target logits given, V 64",
    *(f"{name}, from both hidden states, V 64" for name in DIVERGENCES), "paged attention",
    *(f"product of {rows} rows, {dtype}" for dtype in ("float32", "bfloat16") for rows in (1, 4, 8, 32)),
]  # fmt: skip


@pytest.mark.long
def test_every_kernel_is_in_the_table_and_none_failed(tmp_path: Path) -> None:
    out = tmp_path / "kernels.json"
    command = [sys.executable, "-m", "scripts.bench.kernels.run", *TINY, "--out", str(out)]
    done = forked.run(command, capture_output=True, timeout=240, cwd=ROOT)
    assert done.returncode == 0, done.stderr[-3000:]
    for name in CASES:
        assert name in done.stdout
    assert "without liger" in done.stdout and "profiler" not in done.stderr
    report = json.loads(out.read_text())
    assert [case["name"] for case in report["cases"]] == CASES
    for case in report["cases"]:
        for name, way in case["ways"].items():
            assert "failed" not in way, (case["name"], name)
            assert 0 < way["low_ms"] <= way["median_ms"] <= way["high_ms"] and way["runs"] >= 5
            assert (way["share_of_copy"] is None) == (case["floor_ms"] == 0)
    divergences = [case for case in report["cases"] if case["ways"].keys() >= {"products"}]
    assert len(divergences) == 1 + len(DIVERGENCES)
    for case in divergences:
        assert list(case["ways"]) == ["ours", "reference", "products"]
        assert case["ways"]["reference"]["peak_mib"] > 0
    # A walk reads the root's rows of p and q of all four requests at least, and fewer than the
    # tree has.
    (tree,) = (case for case in report["cases"] if case["name"] == "tree verification, V 64")
    rows = tree["floor_ms"] / 1e3 * report["copy_bytes_s"] / (4 * 64)
    assert rows == pytest.approx(round(rows)) and 8 <= rows < 4 * (6 + 3)
    assert report["copy_bytes_s"] > 1e8
    assert "load" in report["machine"] and "torch" in report["machine"]["versions"]
