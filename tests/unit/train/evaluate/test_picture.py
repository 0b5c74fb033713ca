"""The pictures of an evaluation, and of a run from its metrics."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from matplotlib import pyplot

from draftsmith.train.evaluate.picture import draw_curves, draw_figures

TAU = {"tau": {"value": 2.0, "low": 1.5, "high": 2.5}}
TRAINED = {"loss": 2.0, "tau": 1.5, "alpha_1": 0.4, "alpha_2": 0.3}
MEASURED = {
    "eval_tau_t0": 1.6, "eval_tau_t0_low": 1.5, "eval_tau_t0_high": 1.7,
    "eval_predicted_tau_t0": 1.55,
}  # fmt: skip


@pytest.fixture
def figures(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> list[Any]:
    """Figures that are drawn into `picture.png`."""
    found: list[Any] = []

    def close(figure: Any) -> None:
        assert (tmp_path / "picture.png").read_bytes().startswith(b"\x89PNG")
        found.append(figure)

    monkeypatch.setattr(pyplot, "close", close)
    return found


def test_every_folder_has_a_point_whatever_its_name(tmp_path: Path, figures: list[Any]) -> None:
    folders = dict.fromkeys(["a/x/answers", "a/y/answers", r"a/x/pay$\x$"], TAU)
    found = [{"temperature": 0.0, "alpha": [None], "folders": folders, **TAU}]
    draw_figures(found, tmp_path / "picture.png")
    labels = [one.get_text() for one in figures[0].axes[0].get_xticklabels()]
    assert labels == ["x/answers", "y/answers", r"x/pay$\x$", "all"]


def test_the_temperatures_of_one_row_stand_at_its_name(tmp_path: Path, figures: list[Any]) -> None:
    found = [{"temperature": at, "alpha": [None], **TAU} for at in (0.0, 1.0)]
    draw_figures(found, tmp_path / "picture.png")
    axes = figures[0].axes[0]
    assert axes.get_xlim() == (-0.5, 0.5)
    places = [float(bars.lines[0].get_xdata()[0]) for bars in axes.containers]
    assert places == pytest.approx([-0.075, 0.075])


@pytest.mark.parametrize(
    ("lines", "labels"),
    [
        (
            [{"step": 5, **TRAINED}, {"step": 10, **TRAINED}, {"step": 10, **MEASURED}],
            [
                ["loss"],
                ["alpha_1", "alpha_2"],
                ["held out, measured, T=0", "held out, predicted, T=0", "training text, predicted"],
            ],
        ),
        ([{"step": 5}], [[], [], []]),
    ],
)
def test_what_was_trained_and_measured_is_drawn(
    lines: list[dict[str, Any]], labels: list[list[str]], tmp_path: Path, figures: list[Any]
) -> None:
    metrics = tmp_path / "metrics.jsonl"
    metrics.write_text("".join(json.dumps(line) + "\n" for line in lines), encoding="utf-8")
    draw_curves(metrics, tmp_path / "picture.png")
    (figure,) = figures
    assert all(float(tick).is_integer() for axes in figure.axes for tick in axes.get_xticks())
    assert [sorted(axes.get_legend_handles_labels()[1]) for axes in figure.axes] == labels
