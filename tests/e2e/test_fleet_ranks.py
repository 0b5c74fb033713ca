"""An unmodified vLLM on the CPU with two tensor-parallel ranks: both have the version that is swapped
in, one that is refused stays out of both, and each request is recorded once, by the first rank.

`DRAFTSMITH_VLLM_PYTHON` names the Python of vLLM's own environment (`scripts/test --all` makes
one).
"""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import httpx
import pytest

from draftsmith.distill.buffer.traffic import stitch
from draftsmith.record import RoundRecord, hashed_answer
from scripts.bench.fleet.answers import recorded
from tests.e2e.test_fleet_swap import SHAPE, Engine, draft_lm, engine, models, with_nan
from tests.round_records import each

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


def settings_in(folder: Path) -> dict[str, Any]:
    return {
        "buffer": str(folder / "buffer"), "version": "1", "engine": "e2e", "admin": True,
        "mend_expand_kernel": True, "cache": str(folder / "cache"),
    }  # fmt: skip


def swapped_and_recorded(found: Engine, models: Path, folder: Path) -> dict[str, list[RoundRecord]]:
    """Records by request, each a client's text token by token, of an engine of two workers that
    was given a version that is accepted whole and refused one of NaN."""
    greedy, before = found.generate(24)
    assert found.swap(models / "perfect", "2").json()["ok"], found.log.read_text()[-5000:]
    assert [one["version"] for one in workers(found)] == ["2", "2"]
    assert all(one["last_swap"]["recent_tokens"] for one in workers(found))
    again, after = found.generate(24)
    assert again == greedy and before.tau < 1.5 < 3.9 < after.tau
    with_nan(shutil.copytree(models / "draft", folder / "bad"))
    assert found.swap(folder / "bad", "3").status_code == 409
    assert {one["version"] for one in workers(found)} == {"2"}
    answers = [(prompt, *ask(found, prompt)) for prompt in prompts()]
    expected = len(answers) + 2 * len(greedy)
    records = recorded(str(folder / "buffer"), expected, patience_s=120.0)
    assert len(records) == expected
    for prompt, name, tokens in answers:
        own = records[hashed_answer(name)]
        text = stitch(own)
        assert text is not None and text.tokens == prompt + tokens
        assert len(text.records) == len(own)
        assert {one.draft_version for one in text.records if one.drafted} == {"2"}
    return records


def test_both_ranks_have_one_version_and_the_first_records(
    models: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # Left to itself vLLM keeps a core for its server, and two cores are too few for both ranks.
    monkeypatch.setenv("VLLM_CPU_OMP_THREADS_BIND", "0|1")
    options = ["--tensor-parallel-size", "2"]
    target, settings = models / "target", settings_in(tmp_path)
    with engine(target, tmp_path, draft_lm(models), settings, *options) as found:
        records = swapped_and_recorded(found, models, tmp_path)
        counted = [one["records"] for one in workers(found) if one.get("records")]
        assert [one["requests"] for one in counted] == [len(records)]
        assert counted[0]["errors"] == 0
    assert {own[0].engine for own in records.values()} == {"e2e"}
    # Whole rows of the vocabulary, although each rank holds half of the head.
    found = [one for own in records.values() for one in own if len(one.p)]
    assert (
        found and max(max(p.ids) for one in found for p in each(one.p)) >= SHAPE["vocab_size"] // 2
    )
