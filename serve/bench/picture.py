"""Figures of a bench run as one picture."""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from draftsmith.files import bars, drawn
from draftsmith.serve.bench.report import Figures


def draw(cases: Sequence[Figures], path: str | Path) -> None:
    """Draw tok/s of the cases beside each other, by task where there are tasks; alpha by draft
    position; and, for several users, tok/s of one against tok/s of all."""
    fewest = min(case["concurrency"] for case in cases)
    shown = [case for case in cases if case["concurrency"] == fewest]
    is_sweep = len(shown) < len(cases)
    has_tasks = bool(shown[0].get("tasks"))
    widths = [8 if has_tasks else 4.5, 4.5, *([4.5] if is_sweep else [])]
    size = (sum(widths), 3.8)
    with drawn(path, len(widths), figsize=size, width_ratios=widths) as axes:
        (_draw_tasks if has_tasks else _draw_cases)(axes[0], shown)
        _draw_alpha(axes[1], shown)
        if is_sweep:
            _draw_sweep(axes[2], cases)


def _name(case: Figures) -> str:
    return f"{case['mode']}, T = {case['temperature']:g}"


def _colours(cases: Sequence[Figures]) -> list[Any]:
    """Greys for what is off, a colour for each other case."""
    off = iter(("tab:grey", "silver", "lightgrey"))
    return [next(off, "grey") if case["mode"] == "off" else f"C{n}" for n, case in enumerate(cases)]


def _draw_cases(axes: Any, cases: Sequence[Figures]) -> None:
    names = [_name(case).replace(", ", "\n") for case in cases]
    axes.bar(names, [case["tokens_per_s"] for case in cases], color=_colours(cases))
    axes.set_ylabel("tokens / s")


def _draw_tasks(axes: Any, cases: Sequence[Figures]) -> None:
    wide = 0.8 / len(cases)
    for number, (case, colour) in enumerate(zip(cases, _colours(cases))):
        speeds = [own["tokens_per_s_user"] for own in case["tasks"].values()]
        bounds = [own["tokens_per_s_user_95"] for own in case["tasks"].values()]
        places = [at + (number - (len(cases) - 1) / 2) * wide for at in range(len(speeds))]
        axes.bar(places, speeds, wide, yerr=bars(speeds, bounds), capsize=2, color=colour,
                 label=_name(case))  # fmt: skip
    names = list(cases[0]["tasks"])
    labels = [name.replace("_", "\n") for name in names]
    axes.set_xticks(range(len(names)), labels, fontsize=8, parse_math=False)
    axes.set_ylabel("tokens / s of a user")
    axes.legend(fontsize=8, ncols=2)
    axes.margins(y=0.2)


def _draw_alpha(axes: Any, cases: Sequence[Figures]) -> None:
    for case, colour in zip(cases, _colours(cases)):
        found = case["acceptance"]
        if found is not None:
            alphas = [math.nan if alpha is None else alpha for alpha in found["alpha"]]
            label = f"{_name(case)}, tau = {found['tau']:.2f}"
            axes.plot(range(1, len(alphas) + 1), alphas, marker="o", color=colour, label=label)
    axes.set(xlabel="draft position", ylabel="alpha", ylim=(0, 1))
    axes.locator_params("x", integer=True, min_n_ticks=1)
    if axes.lines:
        axes.legend(fontsize=8)


def _draw_sweep(axes: Any, cases: Sequence[Figures]) -> None:
    kinds = list({(case["temperature"], case["mode"]): case for case in cases}.values())
    for kind, colour in zip(kinds, _colours(kinds)):
        line = [case for case in cases if _name(case) == _name(kind)]
        users = [case["tokens_per_s_user"] for case in line]
        whole = [case["tokens_per_s"] for case in line]
        axes.plot(users, whole, marker="o", color=colour, label=_name(kind))
        for case, x, y in zip(line, users, whole):
            axes.annotate(str(case["concurrency"]), (x, y), (3, 3), textcoords="offset points",
                          fontsize=7)  # fmt: skip
    axes.margins(0.15)
    axes.set(xlabel="tokens / s of a user", ylabel="tokens / s in all")
    axes.set_title("by number of users at once", fontsize=8)
    axes.legend(fontsize=8)
