"""An unmodified vLLM on the CPU with two data-parallel replicas behind one server: both have the
version that is swapped in, one that is refused stays out of both, and each records its share of the
requests.

`DRAFTSMITH_VLLM_PYTHON` names the Python of vLLM's own environment (`scripts/test --all` makes
one).
"""

from __future__ import annotations

import shutil
from collections import Counter
from pathlib import Path
from typing import Any

import httpx
import pytest

from draftsmith.distill.buffer.traffic import stitch
from draftsmith.record import hashed_answer
from tests.e2e.test_fleet_swap import Engine, K, engine, models, with_nan
from tests.e2e.test_fleet_vllm import recorded

pytestmark = [pytest.mark.long, pytest.mark.timeout(2400)]

__all__ = ["models"]  # the fixture


def prompts() -> list[list[int]]:
    return [[10 + (i * 41 + j * 13) % 270 for j in range(8 + i)] for i in range(12)]


def ask(found: Engine, prompt: list[int]) -> tuple[str, list[int]]:
    body = {
        "model": "tiny", "prompt": prompt, "max_tokens": 24, "temperature": 1.0,
        "ignore_eos": True, "return_token_ids": True,
    }  # fmt: skip
    answer = found.post("/v1/completions", body)
    assert answer.status_code == 200, answer.text + found.log.read_text()[-3000:]
    values = answer.json()
    return values["id"], values["choices"][0]["token_ids"]


def workers(found: Engine) -> list[dict[str, Any]]:
    answer = httpx.get(f"{found.url}/draftsmith/status", timeout=60).json()
    return list(answer["workers"])


def test_both_replicas_have_one_version_and_each_records(models: Path, tmp_path: Path) -> None:
    buffer = tmp_path / "buffer"
    settings = {
        "buffer": str(buffer), "version": "1", "engine": "e2e", "admin": True,
        "mend_expand_kernel": True, "cache": str(tmp_path / "cache"),
    }  # fmt: skip
    speculative = {
        "method": "draft_model", "model": str(models / "draft"), "num_speculative_tokens": K,
    }  # fmt: skip
    options = ["--data-parallel-size", "2"]
    with engine(models / "target", tmp_path, speculative, settings, *options) as found:
        greedy, before = found.generate(24)
        assert found.swap(models / "perfect", "2").json()["ok"], found.log.read_text()[-5000:]
        assert [one["version"] for one in workers(found)] == ["2", "2"]
        assert all(one["last_swap"]["recent_tokens"] for one in workers(found))
        again, after = found.generate(24)
        assert again == greedy and before.tau < 1.5 < 3.9 < after.tau
        with_nan(shutil.copytree(models / "draft", tmp_path / "bad"))
        assert found.swap(tmp_path / "bad", "3").status_code == 409
        assert {one["version"] for one in workers(found)} == {"2"}
        answers = [(prompt, *ask(found, prompt)) for prompt in prompts()]
        records = recorded(buffer, len(answers) + 2 * len(greedy))
    by_answer = {name.partition("-")[0]: own for name, own in records.items()}
    for prompt, name, tokens in answers:
        text = stitch(by_answer[hashed_answer(name)])
        assert text is not None and text.tokens == prompt + tokens
        assert {one.draft_version for one in text.records if one.drafted} == {"2"}
    engines = Counter(own[0].engine for own in records.values())
    print(engines)
    assert engines.keys() == {"e2e", "e2e-1"}
