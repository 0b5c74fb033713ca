"""The picture of an evaluation."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from matplotlib import pyplot

from draftsmith.train.evaluate.picture import draw_figures

TAU = {"tau": {"value": 2.0, "low": 1.5, "high": 2.5}}


def test_every_folder_has_a_point_whatever_its_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    figures: list[Any] = []
    monkeypatch.setattr(pyplot, "close", figures.append)
    folders = dict.fromkeys(["a/x/answers", "a/y/answers", r"a/x/pay$\x$"], TAU)
    found = [{"temperature": 0.0, "alpha": [None], "folders": folders, **TAU}]
    draw_figures(found, tmp_path / "figures.png")
    assert (tmp_path / "figures.png").read_bytes().startswith(b"\x89PNG")
    labels = [one.get_text() for one in figures[0].axes[0].get_xticklabels()]
    assert labels == ["x/answers", "y/answers", r"x/pay$\x$", "all"]


def test_the_temperatures_of_one_row_stand_at_its_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    figures: list[Any] = []
    monkeypatch.setattr(pyplot, "close", figures.append)
    found = [{"temperature": at, "alpha": [None], **TAU} for at in (0.0, 1.0)]
    draw_figures(found, tmp_path / "figures.png")
    axes = figures[0].axes[0]
    assert axes.get_xlim() == (-0.5, 0.5)
    places = [float(bars.lines[0].get_xdata()[0]) for bars in axes.containers]
    assert places == pytest.approx([-0.075, 0.075])
