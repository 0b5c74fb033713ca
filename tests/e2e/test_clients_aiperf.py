"""aiperf as a load: every request answered, its own count of tokens is ours, and it reads what
became of the drafts."""

from __future__ import annotations

import json
import shlex
from collections.abc import Callable
from pathlib import Path

import pytest

pytestmark = [pytest.mark.long, pytest.mark.timeout(900)]

REQUESTS, TOKENS = 24, 20


@pytest.mark.parametrize("kind", ["chat", "completions"])
def test_a_load_is_answered_and_its_drafts_are_read(
    kind: str,
    start_server: Callable,
    run_client: Callable[..., str],
    near_draft: str,
    tiny_target: Callable[..., str],
    tmp_path: Path,
) -> None:
    told = ("--per-request-spec-decode-metrics", "summary")
    server = start_server("--draft", near_draft, "--k", "3", *told)
    words = shlex.split(
        f"profile --model tiny --url {server.url} --endpoint-type {kind} --streaming "
        f"--tokenizer {tiny_target('llama')} --request-count {REQUESTS} --concurrency 4 "
        "--extra-inputs ignore_eos:true --synthetic-input-tokens-mean 40 "
        f"--synthetic-input-tokens-stddev 0 --output-tokens-mean {TOKENS} "
        f"--output-tokens-stddev 0 --use-server-token-count --ui simple --artifact-dir {tmp_path}"
    )
    run_client("aiperf", "bin/aiperf", *words, cwd=tmp_path)
    report = json.loads((tmp_path / "profile_export_aiperf.json").read_text())
    assert report["request_count"]["avg"] == REQUESTS
    assert report["output_sequence_length"]["avg"] == TOKENS
    assert report["time_to_first_token"]["avg"] > 0 and report["inter_token_latency"]["avg"] > 0
    assert len((tmp_path / "profile_export.jsonl").read_text().splitlines()) == REQUESTS
    # What it sums up from the responses is what the server counted.
    drafts = server.metric("vllm:spec_decode_num_drafts_total")
    drafted = server.metric("vllm:spec_decode_num_draft_tokens_total")
    told = json.dumps(report)
    assert 0 < server.metric("vllm:spec_decode_num_accepted_tokens_total") < drafted
    histogram = report["pooled_spec_decode_acceptance_histogram"]
    assert sum(histogram.values()) == drafts, told
    assert server.metric("vllm:generation_tokens_total") == REQUESTS * TOKENS
