"""Tables, verdicts and picture of scripts/bench_drafters."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from scripts.bench.drafters.cells import FORWARD_KL
from scripts.bench.drafters.figures import (
    Figure,
    Row,
    alpha,
    over_seeds,
    ratio,
    rows_of,
    tau,
    temperatures,
    trained,
)
from scripts.bench.markdown_table import header, line

Report = dict[str, Any]
MIB = 2**20


def tables(report: Report) -> str:
    """Markdown; parts of which nothing was measured are left out."""
    parts = [
        families(report),
        objectives(report),
        continued(report),
        peers(report),
        equal(report),
        served(report),
        verdicts(report),
    ]
    return "\n\n".join("\n".join(lines) for lines in parts if lines)


def families(report: Report) -> list[str]:
    rows, depths = report["rows"], range(report["k"])
    seen = names(rows, "families") + [f"peers/{name}" for name in names(rows, "peers")]
    if not seen:
        return []
    at = temperatures(rows)
    head = ["draft", "seeds", "steps", "passes", *(f"tau, T = {t:g}" for t in at)]
    head += [f"alpha_{depth + 1}, T = {t:g}" for t in at for depth in depths]
    lines = [*header(*head)]
    for name in seen:
        found = (
            rows_of(rows, "peers", name.removeprefix("peers/"))
            if "/" in name
            else rows_of(rows, "families", name)
        )
        cells = [
            str(len(found)),
            over_seeds(found, trained("steps")).text(0),
            over_seeds(found, trained("passes")).text(1),
        ]
        cells += [over_seeds(found, tau(t)).text() for t in at]
        cells += [
            Figure(over_seeds(found, alpha(t, depth)).mean, math.nan).text()
            for t in at
            for depth in depths
        ]
        label = f"eagle3 by {name.removeprefix('peers/')}" if "/" in name else name
        lines.append(line(label, *cells))
    return lines


def objectives(report: Report) -> list[str]:
    rows = report["rows"]
    base = rows_of(rows, "families", "eagle3")
    return beside_forward_kl(
        rows, "eagle3 trained by", base, "objectives", names(rows, "objectives")
    )


def continued(report: Report) -> list[str]:
    rows = report["rows"]
    base = rows_of(rows, "continued", FORWARD_KL)
    others = [name for name in names(rows, "continued") if name != FORWARD_KL]
    return beside_forward_kl(rows, "eagle3 by forward KL, trained on by", base, "continued", others)


def beside_forward_kl(
    rows: Sequence[Row], title: str, base: dict[int, Row], part: str, seen: Sequence[str]
) -> list[str]:
    if not seen or not base:
        return []
    at = temperatures(rows)
    lines = header(
        title, "seeds", *(f"tau, T = {t:g}" for t in at), *(f"/ forward KL, T = {t:g}" for t in at)
    )
    lines.append(
        line(
            FORWARD_KL,
            str(len(base)),
            *(over_seeds(base, tau(t)).text() for t in at),
            *("1" for _ in at),
        )
    )
    for name in seen:
        found = rows_of(rows, part, name)
        shares = [ratio(found, base, tau(t)).text() for t in at]
        lines.append(
            line(name, str(len(found)), *(over_seeds(found, tau(t)).text() for t in at), *shares)
        )
    return lines


def peers(report: Report) -> list[str]:
    rows, at = report["rows"], temperatures(report["rows"])
    ours, seen = rows_of(rows, "families", "eagle3"), names(rows, "peers")
    if not seen or not ours:
        return []
    lines = header("our eagle3 beside", *(f"tau ratio, T = {t:g}" for t in at))
    return lines + [
        line(name, *(ratio(ours, rows_of(rows, "peers", name), tau(t)).text() for t in at))
        for name in seen
    ]


def equal(report: Report) -> list[str]:
    rows = report["rows"]
    seen = names(rows, "equal")
    if not seen:
        return []
    lines = header(
        "one configuration, texts",
        "seeds",
        "tokens/s",
        "training's peak memory, MiB",
        "process' peak, MiB",
    )
    for name in seen:
        found = rows_of(rows, "equal", name)
        speed = over_seeds(found, trained("tokens_per_s")).text(0)
        memory = [
            mib(over_seeds(found, trained(size))).text(0)
            for size in ("training_bytes", "peak_bytes")
        ]
        lines.append(line(name, str(len(found)), speed, *memory))
    return lines


def served(report: Report) -> list[str]:
    rows = report["rows"]
    lines = header("eagle3 by, first seed", "greedy tau in vLLM", "predicted by `draftsmith eval`")
    for name in names(rows, "served"):
        predicted = rows_of(
            rows, *(("families", "eagle3") if name == "draftsmith" else ("peers", name))
        )
        there = rows_of(rows, "served", name)[0]["trained"]["vllm_tau"]
        lines.append(line(name, f"{there:.3f}", f"{tau(0.0)(predicted[0]):.3f}"))
    return lines if len(lines) > 2 else []


def verdicts(report: Report) -> list[str]:
    lines = list(judged(report))
    return [*header("goal", "measured", ""), *lines] if lines else []


def judged(report: Report) -> Iterator[str]:
    rows = report["rows"]
    ours = rows_of(rows, "families", "eagle3")
    for name in names(rows, "peers"):
        for t in temperatures(rows):
            if ours:
                share = ratio(ours, rows_of(rows, "peers", name), tau(t))
                yield line(
                    f"tau at least 1.05x that of {name}, T = {t:g}",
                    share.text(),
                    at_least(share, 1.05),
                )
    for name in names(rows, "equal"):
        trainer, _, size = name.partition(", ")
        if trainer != "draftsmith" and (mine := rows_of(rows, "equal", f"draftsmith, {size}")):
            their = rows_of(rows, "equal", name)
            speed, memory = (
                ratio(mine, their, trained("tokens_per_s")),
                ratio(mine, their, trained("training_bytes")),
            )
            yield line(
                f"training tokens/s at least 1.3x those of {name}",
                speed.text(2),
                at_least(speed, 1.3),
            )
            yield line(
                f"training memory at most 0.5x that of {name}", memory.text(2), at_most(memory, 0.5)
            )
    for t in temperatures(rows):
        for name in names(rows, "objectives"):
            if ours:
                share = ratio(rows_of(rows, "objectives", name), ours, tau(t))
                yield line(f"{name} above forward KL, T = {t:g}", share.text(), above(share))
        for better, worse in (("dspark", "dflash"), ("dflash", "eagle3")):
            pair = rows_of(rows, "families", better), rows_of(rows, "families", worse)
            if all(pair):
                share = ratio(*pair, tau(t))
                yield line(f"{better} above {worse}, T = {t:g}", share.text(), above(share))


def at_least(share: Figure, goal: float) -> str:
    return sided(share.mean >= goal, share, goal)


def at_most(share: Figure, goal: float) -> str:
    return sided(share.mean <= goal, share, goal)


def sided(met: bool, share: Figure, goal: float) -> str:
    told = "met" if met else "missed"
    if math.isnan(share.half):
        return told + ", one seed"
    return (
        told if abs(share.mean - goal) > share.half else told + ", not clear of the seeds' spread"
    )


def above(share: Figure) -> str:
    if math.isnan(share.half) or abs(share.mean - 1) <= share.half:
        return "undecided"
    return "reproduced" if share.mean > 1 else "refuted"


def names(rows: Sequence[Row], part: str) -> list[str]:
    return list(dict.fromkeys(row["cell"]["name"] for row in rows if row["cell"]["part"] == part))


def mib(bytes_: Figure) -> Figure:
    return Figure(bytes_.mean / MIB, bytes_.half / MIB)


def draw(path: Path, report: Report) -> None:
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    rows = report["rows"]
    titles = {
        "families": "tau by family",
        "objectives": "eagle3 by objective",
        "peers": "eagle3 by trainer",
    }
    panels = {part: bars for part in titles if (bars := bars_of(rows, part))}
    if not panels:
        return
    figure, axes = pyplot.subplots(
        1,
        len(panels),
        figsize=(13, 4),
        width_ratios=[len(bars) for bars in panels.values()],
        sharey=True,
        squeeze=False,
    )
    for axis, (part, bars) in zip(axes[0], panels.items(), strict=True):
        at = temperatures(rows)
        for number, t in enumerate(at):
            taus = [over_seeds(found, tau(t)) for found in bars.values()]
            places = [place + (number - (len(at) - 1) / 2) * 0.38 for place in range(len(bars))]
            # A single seed's half width is nan, which draws nothing.
            axis.bar(
                places,
                [one.mean for one in taus],
                width=0.36,
                yerr=[one.half for one in taus],
                capsize=2,
                label=f"T = {t:g}",
            )
        axis.set_xticks(range(len(bars)), list(bars), rotation=35, ha="right")
        axis.set_title(titles[part])
    axes[0][0].set_ylabel(f"tau, {report['k']} draft tokens per round")
    axes[0][0].set_ylim(bottom=1.0)
    axes[0][0].legend()
    figure.tight_layout()
    figure.savefig(path, dpi=110)


def bars_of(rows: Sequence[Row], part: str) -> dict[str, dict[int, Row]]:
    """Rows by name, the reference of the comparison first; empty where nothing was measured."""
    bars = {name: rows_of(rows, part, name) for name in names(rows, part)}
    base = rows_of(rows, "families", "eagle3") if part != "families" else {}
    return (
        {"forward-kl" if part == "objectives" else "draftsmith": base} if bars and base else {}
    ) | bars
