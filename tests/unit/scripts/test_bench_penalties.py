"""`scripts/bench_round --penalties` times what it says."""

from __future__ import annotations

import json

import pytest

from scripts.bench.engine.penalties import main


def test_every_size_is_timed(capsys: pytest.CaptureFixture[str]) -> None:
    main(
        [
            "--rows",
            "3",
            "--penalised",
            "0",
            "2",
            "--text",
            "9",
            "--vocabulary",
            "16",
            "--rounds",
            "2",
        ]
    )
    printed = capsys.readouterr().out
    rows = json.loads(printed[printed.index("{") :])["rows"]
    assert [(row["vocabulary"], row["penalised"]) for row in rows] == [(16, 0), (16, 2)]
    assert all(0 < row["follow"] < row["adjust"] and row["copy"] > 0 for row in rows)
