"""A run's metrics.jsonl as one picture: loss, alpha, tau as predicted in training and measured on
held-out prompts."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

TEMPERATURES = {"t0": "tab:blue", "t1": "tab:orange"}


def draw_curves(metrics: Path, picture: Path) -> None:
    """Writes `picture`, a PNG; the library is imported here, because a run that is not drawn need
    not wait for it."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    with metrics.open(encoding="utf-8") as file:
        lines = [json.loads(line) for line in file]
    figure, (loss, alpha, tau) = pyplot.subplots(1, 3, figsize=(13, 3.6))
    curve(loss, lines, "loss", "loss")
    loss.set(title="loss", xlabel="step")
    for name in names(lines, "alpha_"):
        curve(alpha, lines, name, name)
    alpha.set(title="acceptance in training", xlabel="step", ylim=(0, 1))
    curve(tau, lines, "tau", "training text, predicted")
    for end, colour in TEMPERATURES.items():
        measured(tau, lines, f"eval_tau_{end}", colour, f"held out, measured, T={end[1:]}")
        curve(
            tau,
            lines,
            f"eval_predicted_tau_{end}",
            f"held out, predicted, T={end[1:]}",
            color=colour,
            linestyle=":",
        )
    tau.set(title="acceptance length tau, 95 % intervals", xlabel="step", ylabel="tokens per round")
    for axes in (alpha, tau):
        if axes.get_legend_handles_labels()[0]:
            axes.legend(fontsize=7)
    figure.tight_layout()
    figure.savefig(picture, dpi=110, format="png")
    pyplot.close(figure)


def names(lines: list[dict[str, Any]], begin: str) -> list[str]:
    return sorted({name for line in lines for name in line if name.startswith(begin)})


def curve(axes: Any, lines: list[dict[str, Any]], name: str, label: str, **style: str) -> None:
    given = [line for line in lines if name in line]
    if given:
        axes.plot(
            [line["step"] for line in given], [line[name] for line in given], label=label, **style
        )


def measured(axes: Any, lines: list[dict[str, Any]], name: str, colour: str, label: str) -> None:
    given = [line for line in lines if name in line]
    if not given:
        return
    values = [line[name] for line in given]
    below = [max(0.0, line[name] - line[f"{name}_low"]) for line in given]
    above = [max(0.0, line[f"{name}_high"] - line[name]) for line in given]
    steps = [line["step"] for line in given]
    axes.errorbar(
        steps,
        values,
        yerr=[below, above],
        fmt="o-",
        color=colour,
        label=label,
        capsize=3,
        markersize=3,
    )
