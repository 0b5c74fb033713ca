"""Figures of an evaluation, and of a whole training, as one picture each."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from draftsmith.config import short_names
from draftsmith.files import bars, drawn

TEMPERATURES = {"t0": "tab:blue", "t1": "tab:orange"}


def draw_figures(found: Sequence[dict[str, Any]], path: str | Path) -> None:
    """Draw tau by task or folder, and alpha by draft position, of the evaluations in a record, one
    a temperature, with 95 % intervals."""
    with drawn(path, 2, figsize=(12, 3.6), width_ratios=(2, 1)) as (tau, alpha):
        for number, one in enumerate(found):
            label = f"T = {one['temperature']:g}"
            folders = one.get("folders", {})
            names = [name.replace("_", "\n") for name in [*short_names(folders), "all"]]
            taus = [own["tau"] for own in [*folders.values(), one]]
            aside = 0.3 * ((number + 0.5) / len(found) - 0.5)
            places = [at + aside for at in range(len(taus))]
            tau.errorbar(places, **_bars(taus), fmt="o", label=label)
            tau.set_xticks(range(len(names)), names, fontsize=8, parse_math=False)
            tau.set_xlim(-0.5, len(names) - 0.5)  # of one row too
            depths = {at: own for at, own in enumerate(one["alpha"], start=1) if own is not None}
            alpha.errorbar(list(depths), **_bars(list(depths.values())), fmt="o-")
        tau.set_ylabel("tau, tokens per round")
        tau.legend(fontsize=8)
        alpha.set(xlabel="draft position", ylabel="alpha", ylim=(0, 1))
        alpha.xaxis.get_major_locator().set_params(integer=True)


def _bars(estimates: Sequence[dict[str, float]]) -> dict[str, Any]:
    values = [one["value"] for one in estimates]
    bounds = [(one["low"], one["high"]) for one in estimates]
    return {"y": values, "yerr": bars(values, bounds), "capsize": 3}


def draw_curves(metrics: Path, path: Path) -> None:
    """Draw loss, alpha and tau of a run from its lines of metrics."""
    with metrics.open(encoding="utf-8") as file:
        lines = [json.loads(line) for line in file]
    with drawn(path, 3, figsize=(13, 3.6)) as (loss, alpha, tau):
        _curve(loss, lines, "loss", label="loss")
        loss.set(title="loss", xlabel="step")
        for name in sorted({name for line in lines for name in line if name.startswith("alpha_")}):
            _curve(alpha, lines, name, label=name)
        alpha.set(title="acceptance in training", xlabel="step", ylim=(0, 1))
        _curve(tau, lines, "tau", label="training text, predicted")
        for end, colour in TEMPERATURES.items():
            _measured(tau, lines, end, colour)
            _curve(
                tau,
                lines,
                f"eval_predicted_tau_{end}",
                label=f"held out, predicted, T={end[1:]}",
                color=colour,
                linestyle=":",
                marker="x",  # a single evaluation is no line
            )
        title = "acceptance length tau, 95 % intervals"
        tau.set(title=title, xlabel="step", ylabel="tokens per round")
        for axes in (loss, alpha, tau):
            axes.xaxis.get_major_locator().set_params(integer=True)
        for axes in (alpha, tau):
            if axes.get_legend_handles_labels()[0]:
                axes.legend(fontsize=7)


def _curve(axes: Any, lines: list[dict[str, Any]], name: str, **style: str) -> None:
    given = [line for line in lines if name in line]
    if given:
        axes.plot([line["step"] for line in given], [line[name] for line in given], **style)


def _measured(axes: Any, lines: list[dict[str, Any]], end: str, colour: str) -> None:
    name = f"eval_tau_{end}"
    given = [line for line in lines if name in line]
    ends = {"value": name, "low": f"{name}_low", "high": f"{name}_high"}
    estimates = [{key: line[own] for key, own in ends.items()} for line in given]
    if given:
        label = f"held out, measured, T={end[1:]}"
        style: dict[str, Any] = {"fmt": "o-", "color": colour, "markersize": 3, "label": label}
        axes.errorbar([line["step"] for line in given], **_bars(estimates), **style)
