"""Figures of an evaluation as one picture."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from draftsmith.config import short_names


def draw_figures(found: Sequence[dict[str, Any]], path: str | Path) -> None:
    """Draw tau by task or folder, and alpha by draft position, of the evaluations in a record, one
    a temperature, with 95 % intervals."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, (tau, alpha) = pyplot.subplots(1, 2, figsize=(12, 3.6), width_ratios=(2, 1))
    for number, one in enumerate(found):
        label = f"T = {one['temperature']:g}"
        folders = one.get("folders", {})
        names = [name.replace("_", "\n") for name in [*short_names(folders), "all"]]
        taus = [own["tau"] for own in [*folders.values(), one]]
        aside = 0.3 * ((number + 0.5) / len(found) - 0.5)
        places = [at + aside for at in range(len(taus))]
        tau.errorbar(places, **_bars(taus), fmt="o", capsize=3, label=label)
        tau.set_xticks(range(len(names)), names, fontsize=8, parse_math=False)
        tau.set_xlim(-0.5, len(names) - 0.5)  # of one row too
        depths = {at: own for at, own in enumerate(one["alpha"], start=1) if own is not None}
        alpha.errorbar(list(depths), **_bars(list(depths.values())), fmt="o-", capsize=3)
    tau.set_ylabel("tau, tokens per round")
    tau.legend(fontsize=8)
    alpha.set(xlabel="draft position", ylabel="alpha", ylim=(0, 1))
    alpha.xaxis.get_major_locator().set_params(integer=True)
    figure.tight_layout()
    figure.savefig(path, dpi=110, format="png")
    pyplot.close(figure)


def _bars(estimates: Sequence[dict[str, float]]) -> dict[str, Any]:
    values = [one["value"] for one in estimates]
    below = [max(0.0, one["value"] - one["low"]) for one in estimates]
    above = [max(0.0, one["high"] - one["value"]) for one in estimates]
    return {"y": values, "yerr": [below, above]}
