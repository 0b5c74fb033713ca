"""The parts of a captured pass that `scripts/bench_step --kernels` times."""

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
from scripts.bench.engine import step
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
