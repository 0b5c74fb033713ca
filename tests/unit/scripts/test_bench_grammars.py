"""`scripts/bench_round --grammars` compares drafts under the same grammars."""

from __future__ import annotations

import json

import pytest

from draftsmith.kernels.dispatch import reads_freely
from draftsmith.serve.sampling import adjustments
from scripts.bench.engine.grammars import main


@pytest.mark.long
def test_every_grammar_is_drafted_both_ways(capsys: pytest.CaptureFixture[str]) -> None:
    main(["--prompts", "2", "--max-tokens", "12", "--seeds", "1", "--k", "2"])
    printed = capsys.readouterr().out
    rows = json.loads(printed[printed.index("{") :])["rows"]
    assert len(rows) == 8 and adjustments.reads_freely is reads_freely
    assert all(1 <= tau <= 3 for row in rows for tau in (*row["every"], *row["first"]))
    assert any(row["every"] != row["first"] for row in rows)
