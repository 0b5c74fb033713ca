"""schemathesis on /openapi.json: no 500, no status or body that the schema does not know, nothing
wrong taken for right."""

from __future__ import annotations

import shlex
from collections.abc import Callable
from pathlib import Path

import httpx
import pytest

pytestmark = [pytest.mark.long, pytest.mark.timeout(1200)]

# All but the one that holds it against a server when a value that fits the schema is refused: that
# max_tokens fits the context, that ids are in the vocabulary and that two parameters go together is
# more than a schema of OpenAI's requests can say.
LEFT_OUT = "positive_data_acceptance"


@pytest.mark.parametrize("flags", [(), ("--api-key", "first", "second")], ids=["open", "guarded"])
def test_the_schema_tells_all_that_comes(
    flags: tuple[str, ...], start_server: Callable, run_client: Callable[..., str], tmp_path: Path
) -> None:
    told = ("--per-request-spec-decode-metrics", "detailed")
    server = start_server("--suffix", "--k", "3", *told, *flags)
    # Spelt so: schemathesis leaves out no other spelling when it tries without a key.
    headers = {"Authorization": "Bearer second"} if flags else {}
    words = shlex.split(
        f"run {server.url}/openapi.json --checks all --exclude-checks {LEFT_OUT} "
        "--continue-on-failure --max-examples 40 --seed 20261121 --request-timeout 60 "
        "--phases examples,coverage,fuzzing --suppress-health-check all"
    )
    for name, value in headers.items():
        words += ["--header", f"{name}: {value}"]
    told = run_client("schemathesis", "bin/schemathesis", *words, cwd=tmp_path)
    assert "❌" not in told and "Tested: 16" in told
    # The server has come through it, and some of the requests were answers and no refusals.
    answer = {"model": "tiny", "prompt": "x", "max_tokens": 4}
    url = f"{server.url}/v1/completions"
    assert httpx.post(url, json=answer, headers=headers, timeout=60).status_code == 200
    assert server.metric("vllm:request_success_total") > 5
