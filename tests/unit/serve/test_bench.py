from __future__ import annotations

import json
import math
from pathlib import Path

import pytest

from draftsmith.errors import UserError
from draftsmith.serve.bench_client import Answer, PassResult
from draftsmith.serve.bench_prompts import read_prompts
from draftsmith.serve.bench_report import Case, acceptance, figures, percentile, ratios, table


def test_percentiles_are_nearest_ranks() -> None:
    assert percentile([4.0, 1.0, 3.0, 2.0], 0.5) == 2.0
    assert percentile([4.0, 1.0, 3.0, 2.0], 0.95) == 4.0
    assert percentile([7.0], 0.5) == 7.0
    assert math.isnan(percentile([], 0.5))


def answer(num_tokens: int, ttft_s: float, tpot_s: float, report: dict | None = None) -> Answer:
    last_s = ttft_s + tpot_s * (num_tokens - 1)
    return Answer(num_tokens=num_tokens, first_s=ttft_s, last_s=last_s, report=report)


def report(offered: list[int], accepted: list[int], committed: list[int]) -> dict:
    return {"per_step_drafted": offered, "per_step_accepted": accepted, "per_step_committed": committed}


def case(mode: str, walls_s: list[float], report_: dict | None = None) -> Case:
    return Case(0.0, mode, [PassResult([answer(10, 0.1, 0.02, report_), answer(30, 0.3, 0.04, report_)], w) for w in walls_s])


def test_figures_and_ratio_of_modes() -> None:
    off, on = figures(case("off", [4.0, 4.0])), figures(case("on", [2.0, 1.0], report([2, 2], [2, 0], [3, 1])))
    assert off["tokens_per_s"] == 10 and on["tokens_per_s"] == pytest.approx(80 / 3)
    assert off["ttft_ms"] == {"p50": 100.0, "p95": pytest.approx(300.0)}
    assert off["tpot_ms"]["p50"] == pytest.approx(20.0) and off["acceptance"] is None
    assert on["acceptance"]["tau"] == 2.0 and on["acceptance"]["alpha"] == [0.5, 1.0]
    ratio = ratios([off, on])[0]
    assert (ratio["speedup"], ratio["lowest"], ratio["highest"]) == (pytest.approx(8 / 3), 2.0, 4.0)
    assert "speculation on / off = 2.67 (2.00 to 4.00 by pass)" in table([off, on])


def test_answers_without_drafts_do_not_count_towards_acceptance() -> None:
    assert acceptance([report([], [], [])]) is None
    found = acceptance([report([], [], []), report([3], [1], [2])])
    assert found["rounds"] == 1 and found["tau"] == 2.0


def test_prompts_of_files(tmp_path: Path) -> None:
    lines = tmp_path / "prompts.txt"
    lines.write_text("one\n\ntwo\n", encoding="utf-8")
    assert read_prompts(str(lines), count=3, chars=1, seed=0) == [{"prompt": "one"}, {"prompt": "two"}, {"prompt": "one"}]
    chats = [{"role": "user", "content": "hi"}]
    rows = tmp_path / "prompts.jsonl"
    rows.write_text(json.dumps({"prompt": "a", "id": 1}) + "\n" + json.dumps({"messages": chats}), encoding="utf-8")
    assert read_prompts(str(rows), count=2, chars=1, seed=0) == [{"prompt": "a"}, {"messages": chats}]


def test_built_in_prompts_depend_on_the_seed_alone() -> None:
    prompts = read_prompts("stdlib:code", count=5, chars=80, seed=3)
    assert prompts == read_prompts("stdlib:code", count=5, chars=80, seed=3)
    assert prompts != read_prompts("stdlib:code", count=5, chars=80, seed=4)
    assert all(len(prompt["prompt"]) == 80 for prompt in prompts)


@pytest.mark.parametrize("name, text, words", [
    ("a.jsonl", "{bad", "line 1"),
    ("a.jsonl", '{"text": 1}', "neither"),
    ("a.txt", "\n\n", "empty"),
    ("missing.txt", None, "no file"),
])  # fmt: skip
def test_prompt_files_that_cannot_be_used_are_refused(name: str, text: str | None, words: str, tmp_path: Path) -> None:
    if text is not None:
        (tmp_path / name).write_text(text, encoding="utf-8")
    with pytest.raises(UserError, match=words):
        read_prompts(str(tmp_path / name), count=1, chars=10, seed=0)
