"""The parts of a captured pass that `scripts/bench_step --kernels` and `--rounds` time."""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path

import pytest
import torch

from draftsmith.drafters.compiled.captured import capture_lm
from draftsmith.drafters.compiled.packed_linear import GatedLinear, PackedLinear
from draftsmith.drafters.target.target import Target
from draftsmith.kernels.products.few_rows import few_rows
from scripts.bench.engine import round_kernels, step
from scripts.paths import ROOT

needs_compiler = pytest.mark.skipif(
    few_rows(torch.ones(1, 64), None) is None, reason="there is no C++ compiler"
)


@needs_compiler
def test_kernels_of_a_pass_are_told_apart(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "kernels.json"
    target = str(ROOT / "scripts" / "quickstart_target")
    words = ["bench_step", "--target", target, "--kernels", "--steps", "1", "--out", str(out)]
    monkeypatch.setattr("sys.argv", words)
    monkeypatch.setattr(step, "TURNS", 1)
    step.main()
    kernels = json.loads(out.read_text())["kernels_ms"]
    assert list(kernels) == ["1 tokens", "4 tokens", "8 tokens"]
    for ms in kernels.values():
        # Queries, keys and values; a gate with twice its outputs; the way back from it.
        assert {"multiply 256 x 512", "gated 256 x 2*512", "multiply 512 x 256", "attend"} <= set(
            ms
        )
        assert all(value > 0 for value in ms.values())
    assert "gated 256 x 2*512" in capsys.readouterr().out


def test_a_pass_that_is_not_one_call_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    target = str(ROOT / "scripts" / "quickstart_target")
    monkeypatch.setattr("sys.argv", ["bench_step", "--target", target, "--kernels"])
    monkeypatch.setattr(step, "kernel_times", lambda *given: {})
    with pytest.raises(SystemExit, match="not one call"):
        step.main()


@needs_compiler
def test_products_stand_beside_torchs_by_shape(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "products.json"
    target = str(ROOT / "scripts" / "quickstart_target")
    words = ["bench_step", "--target", target, "--products", "--steps", "1", "--out", str(out)]
    monkeypatch.setattr("sys.argv", words)
    step.main()
    found = json.loads(out.read_text())["products_ms"]
    assert {"256 x 2 * 512, 1", "512 x 256, 4", "256 x 512, 256"} <= found.keys()
    for row in found.values():
        others = [ms for way, ms in row.items() if way in ("torch", "oneDNN")]
        assert row["ratio"] == pytest.approx(min(others) / row["ours"])
    printed = capsys.readouterr().out
    assert "512 x 256, more than 64 rows: " in printed and "few rows, float32 gated" in printed


@needs_compiler
def test_products_are_those_of_a_captured_pass() -> None:
    target = Target.load(str(ROOT / "scripts" / "quickstart_target"), dtype=torch.float32)
    capture_lm(target)
    assert target.forwards is not None
    made = [one for part in target.forwards for one in part._packed]
    found = step.captured_products(target.model)
    shapes = [
        Counter((type(one), tuple(len(weight) for weight in one.weights)) for one in products)
        for products in (made, found)
    ]
    assert shapes[0] == shapes[1] and {GatedLinear, PackedLinear} == {type(one) for one in found}


def test_kernels_are_timed_inside_the_call_of_a_pass_and_of_rounds(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "rounds.json"
    monkeypatch.setattr("sys.argv", ["bench_step", "--turns", "1", "--out", str(out)])
    for name, value in {"STEPS": 2, "MAX_TOKENS": 8, "PROMPT_CHARS": 40}.items():
        monkeypatch.setattr(round_kernels, name, value)
    round_kernels.main()
    columns = json.loads(out.read_text())["rounds_ms"]
    assert list(columns)[:2] == ["1 token", "4 tokens"] and list(columns)[-1] == "k = 3, T = 1"
    for name, ms in columns.items():
        assert ms["gated 256 x 2*512"] > 0 and ms["attend"] > 0
        assert ms["pass"] > ms["all kernels"] > ms["gated 256 x 2*512"]
        assert ("round" in ms) == ("T =" in name)
        assert (ms.get("draft", 0) > 0) == name.startswith("k = 3")
    assert "round, CPU time" in capsys.readouterr().out


@needs_compiler
@torch.inference_mode()
def test_the_clock_between_kernels_changes_no_bit() -> None:
    target = Target.load(ROOT / "scripts" / "quickstart_target")
    capture_lm(target)
    run = step.target_pass(target, 4)
    expected = run().logits
    timed = round_kernels.TimedTarget(target, step.CONTEXT + 4)
    found = []
    row = timed.measure({"pass": lambda: found.append(run().logits)}, turns=1)["pass"]
    assert len(found) == 1 + round_kernels.STEPS
    assert all(torch.equal(logits, expected) for logits in found)
    kernels, around = timed.last
    assert len(kernels) == len(timed.calls.labels) and min(kernels) > 0
    outside = around["before the kernels"] + around["behind, with the head"]
    assert sum(kernels) + outside == pytest.approx(around["pass"])
    assert row["all kernels"] == pytest.approx(sum(row[label] for label in set(timed.calls.labels)))
