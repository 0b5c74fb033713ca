"""Stages of scripts/quickstart: sized by the machine, explained, and with a shipped draft that fits
the shipped target; its commands and its report."""

from __future__ import annotations

import json
import logging
from pathlib import Path
from subprocess import CalledProcessError
from typing import Any

import pytest

from draftsmith.drafters import checkpoint
from draftsmith.drafters.layouts import demo
from draftsmith.drafters.target.target import Target
from draftsmith.drafters.text.answers import DEMO, AnswerTable, tokens_of
from draftsmith.files import read_json
from draftsmith.prompts.published import SUITES
from draftsmith.train.export import gguf, openvino
from draftsmith.train.export.portable import check_represented
from scripts.demo import report, ship_draft
from scripts.demo.machine import sizes_of
from scripts.demo.shipped import SHIPPED_DRAFT, SHIPPED_TARGET
from scripts.demo.stages import bench_real, stages

INSTALLATION_S = 150
MOST_S = 600  # as the documents promise


@pytest.mark.parametrize("pace", [3.0, 1.0, 0.5, 0.3])
def test_a_slow_machine_does_less_in_the_same_time(pace: float) -> None:
    plan = stages(train_draft=False, sizes=sizes_of(pace))
    assert sum(stage.seconds for stage in plan) + INSTALLATION_S <= MOST_S
    assert all(stage.proves and stage.summary for stage in plan)
    assert sizes_of(pace).answers <= sizes_of(1.0).answers


def test_speed_is_shown_before_anything_is_trained() -> None:
    names = [stage.name for stage in stages(False, sizes_of(1.0))]
    assert names.index("target") < names.index("speed") < names.index("generate")
    assert "draft" in [stage.name for stage in stages(True, sizes_of(1.0))]


def test_the_real_model_is_passed_over_only_where_it_cannot_be_had(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    monkeypatch.setenv("DRAFTSMITH_SUITES", str(tmp_path))
    monkeypatch.setattr(demo, "file", lambda: tmp_path)
    bench_real()
    assert "passed over" in capsys.readouterr().out
    monkeypatch.setitem(SUITES, "spec-bench", SUITES["spec-bench"]._replace(files=()))
    monkeypatch.setattr("scripts.demo.commands.COMMAND", ["false"])
    with pytest.raises(CalledProcessError):
        bench_real()


def test_the_shipped_draft_is_small_and_made_for_the_shipped_target(
    caplog: pytest.LogCaptureFixture,
) -> None:
    for folder in (SHIPPED_DRAFT, DEMO):
        assert sum(file.stat().st_size for file in folder.iterdir()) <= 8_000_000
    caplog.set_level(logging.WARNING)
    draft = checkpoint.load(SHIPPED_DRAFT, Target.load(SHIPPED_TARGET))
    assert draft.family == "eagle3" and "other weights" not in caplog.text


def test_the_shipped_answers_are_those_of_the_demonstration_model() -> None:
    assert read_json(DEMO / "provenance.json")["target"] == "demo"
    texts = [text for file in DEMO.glob("*.parquet") for text in tokens_of(file)]
    assert len(texts) == 8125 and max(map(max, texts)) < 49152
    token, share = AnswerTable(texts).best([1, 520, 9531])  # <|im_start|>assistant
    assert token == 198 and share > 0.9, "a line break follows"


def test_other_engines_read_the_shipped_draft_as_it_is() -> None:
    config = json.loads((SHIPPED_DRAFT / "config.json").read_text())
    for reader in (gguf.READER, openvino.READER):
        check_represented(config, reader)


def test_the_shipped_draft_was_made_by_the_commands_of_train() -> None:
    assert json.loads((SHIPPED_DRAFT / "training.json").read_text()) == ship_draft.training()
    record = json.loads((SHIPPED_DRAFT / "draftsmith.json").read_text())["training"]
    assert record["steps"] == ship_draft.STEPS and record["data"]["count"] == ship_draft.ANSWERS
    assert record["data"]["complete"] and record["data"]["temperature"] == [0.0, 1.0]


def served(index: int, accepted: int) -> dict[str, Any]:
    return {
        "index": index, "tokens": 4 + accepted, "rounds": 4,
        "accepted": accepted, "tried": 4,
    }  # fmt: skip


SERVED = {"code": 2, "served": [served(n, 2 if n < 2 else n // 3) for n in range(11)], "dropped": 0}


def evaluation(temperature: float, *alpha: float) -> dict[str, Any]:
    tau, reached = 1.0, 1.0
    for value in alpha:
        reached *= value
        tau += reached
    interval = {"low": 0.0, "high": 9.0}
    return {
        "temperature": temperature, "tau": {"value": tau, **interval},
        "alpha": [{"value": value, **interval} for value in alpha],
    }  # fmt: skip


def test_the_report_holds_what_the_documents_show(tmp_path: Path) -> None:
    run = tmp_path / "runs" / "quickstart"
    acceptance = {"tau": 2.0, "tau_95": [1.9, 2.1]}
    cases = [
        {"temperature": t, "mode": mode, "tokens_per_s": speed, "acceptance": found}
        for t in (0.0, 1.0)
        for mode, speed, found in (("off", 10.0, None), ("on", 20.0, acceptance))
    ]
    ratios = [{"temperature": t, "speedup": 2.0} for t in (0.0, 1.0)]
    files: dict[str, Any] = {
        "shift": SERVED,
        "gain-first": {"evaluation": [evaluation(1.0, 0.5)]},
        "gain-live": {"evaluation": [evaluation(1.0, 0.8)]},
    }
    for draft in ("eagle3", "draft-lm"):
        files[f"bench-{draft}"] = {"cases": cases, "ratios": ratios}
        files[f"eval-{draft}"] = {"evaluation": [evaluation(t, 0.5) for t in (0.0, 1.0)]}
    files["bench-demo"] = {"cases": [case | {"num_answers": 7} for case in cases]}
    for name, content in files.items():
        path = run / f"{name}.json"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(json.dumps(content))
    for folder in (run / "export" / "eagle3", run / "versions"):
        folder.mkdir(parents=True)
    report.write_report(run)
    text = (run / "report.txt").read_text()
    assert "live / first: 1.200 of tau" in (run / "report.html").read_text()
    assert "SmolLM2-135M, 7 answers to Spec-Bench, greedy: 10.0 tok/s, with drafts" in text
    assert "live / first: 1.200 of tau" in text and "requests answered: 11; dropped: 0" in text
