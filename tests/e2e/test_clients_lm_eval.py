"""lm-eval's local-completions: the same scores and the same texts whether the server speculates or
not."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

pytestmark = [pytest.mark.long, pytest.mark.timeout(900)]

ITEMS = 8
TASK = """
task: {name}
dataset_path: json
dataset_kwargs:
  data_files:
    test: {items}
test_split: test
doc_to_text: "{{{{question}}}}"
"""
CHOICE = """
output_type: multiple_choice
doc_to_choice: "{{choices}}"
doc_to_target: gold
metric_list:
  - metric: acc
"""
LIKELIHOOD = """
output_type: loglikelihood
doc_to_target: "{{choices[0]}}"
metric_list:
  - metric: perplexity
  - metric: acc
"""
GREEDY = """
output_type: generate_until
doc_to_target: "{{choices[0]}}"
generation_kwargs:
  until: ["\\n\\n"]
  max_gen_toks: 40
  do_sample: false
metric_list:
  - metric: exact_match
"""
TASKS = {"local_choice": CHOICE, "local_likelihood": LIKELIHOOD, "local_greedy": GREEDY}


@pytest.fixture(scope="module")
def tasks(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("tasks")
    items = folder / "items.jsonl"
    choices = [" tokens", " None", " [token for token in tokens]"]
    rows = [
        {"question": f"def name{i}(self, tokens):\n    return", "choices": choices, "gold": i % 3}
        for i in range(ITEMS)
    ]
    items.write_text("".join(json.dumps(row) + "\n" for row in rows))
    for name, kind in TASKS.items():
        (folder / f"{name}.yaml").write_text(TASK.format(name=name, items=items) + kind)
    return folder


def evaluate(run_client: Callable[..., str], url: str, tasks: Path, out: Path) -> dict[str, Any]:
    """Scores by task, and what was answered to every item."""
    model = f"base_url={url}/v1/completions,model=tiny,max_length=256,num_concurrent=2,tokenizer_backend=remote"
    arguments = [
        "--model", "local-completions", "--model_args", model, "--tasks", ",".join(TASKS),
        "--include_path", str(tasks),
    ]  # fmt: skip
    run_client(
        "lm-eval",
        "bin/lm_eval",
        "run",
        *arguments,
        "--log_samples",
        "--output_path",
        str(out),
        cwd=out,
    )
    results = json.loads(next(out.rglob("results_*.json")).read_text())["results"]
    found: dict[str, Any] = {
        "scores": {
            name: {k: v for k, v in of.items() if k != "alias"} for name, of in results.items()
        }
    }
    for name in TASKS:
        lines = next(out.rglob(f"samples_{name}_*.jsonl")).read_text().splitlines()
        found[name] = {sample["doc_id"]: sample["resps"] for sample in map(json.loads, lines)}
    return found


def numbers(answers: dict[int, list]) -> list[float]:
    """The log-likelihoods among lm-eval's nested answers, in order of the items."""
    return [
        float(pair[0])
        for _, answer in sorted(answers.items())
        for request in answer
        for pair in request
    ]


def test_scores_and_texts_are_equal_with_and_without_speculation(
    start_server: Callable,
    run_client: Callable[..., str],
    near_draft: str,
    tasks: Path,
    tmp_path: Path,
) -> None:
    server = start_server("--draft", near_draft, "--k", "3")
    plain = start_server()
    out = {name: tmp_path / name for name in ("on", "off")}
    for folder in out.values():
        folder.mkdir()
    on = evaluate(run_client, server.url, tasks, out["on"])
    off = evaluate(run_client, plain.url, tasks, out["off"])
    drafted = server.metric("vllm:spec_decode_num_draft_tokens_total")
    accepted = server.metric("vllm:spec_decode_num_accepted_tokens_total")
    assert 0 < accepted < drafted, "drafts were to be kept and refused"
    assert plain.metric("vllm:spec_decode_num_draft_tokens_total") == 0
    assert len(on["local_greedy"]) == ITEMS and on["local_greedy"] == off["local_greedy"]
    for name in ("local_choice", "local_likelihood"):
        assert len(on[name]) == ITEMS and numbers(on[name]) == pytest.approx(
            numbers(off[name]), abs=1e-3
        )
    for task, scores in on["scores"].items():
        known = {metric: value for metric, value in scores.items() if isinstance(value, float)}
        assert known == pytest.approx(
            {metric: off["scores"][task][metric] for metric in known}, rel=1e-3
        ), task
