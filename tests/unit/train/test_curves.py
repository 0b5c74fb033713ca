"""The picture of a run, from its metrics."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from matplotlib import pyplot

from draftsmith.train.reporting import draw_curves

TRAINED = {"loss": 2.0, "tau": 1.5, "alpha_1": 0.4, "alpha_2": 0.3}
MEASURED = {
    "eval_tau_t0": 1.6, "eval_tau_t0_low": 1.5, "eval_tau_t0_high": 1.7,
    "eval_predicted_tau_t0": 1.55,
}  # fmt: skip


def drawn(
    lines: list[dict[str, Any]], folder: Path, monkeypatch: pytest.MonkeyPatch
) -> list[list[str]]:
    """Labels of each of the three diagrams."""
    figures: list[Any] = []
    monkeypatch.setattr(pyplot, "close", figures.append)
    metrics = folder / "metrics.jsonl"
    metrics.write_text("".join(json.dumps(line) + "\n" for line in lines), encoding="utf-8")
    draw_curves(metrics, folder / "curves.png")
    assert (folder / "curves.png").read_bytes().startswith(b"\x89PNG")
    (figure,) = figures
    assert all(float(tick).is_integer() for axes in figure.axes for tick in axes.get_xticks())
    return [axes.get_legend_handles_labels()[1] for axes in figure.axes]


def test_what_was_trained_and_measured_is_drawn(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    lines = [{"step": 5, **TRAINED}, {"step": 10, **TRAINED}, {"step": 10, **MEASURED}]
    loss, alpha, tau = drawn(lines, tmp_path, monkeypatch)
    assert loss == ["loss"] and alpha == ["alpha_1", "alpha_2"]
    assert sorted(tau) == [
        "held out, measured, T=0", "held out, predicted, T=0", "training text, predicted",
    ]  # fmt: skip


def test_a_run_without_figures_is_drawn_empty(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert drawn([{"step": 5}], tmp_path, monkeypatch) == [[], [], []]
