"""Tables, verdicts and picture of scripts/bench_online."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from statistics import mean
from typing import Any

from scripts.bench.drafters.figures import Figure
from scripts.bench.markdown_table import header, line
from scripts.bench.online import measures as measures
from scripts.bench.online.cells import BASELINES, BOUNDS, CURVES, RETURNS, SECOND, THIRD
from scripts.bench.online.changes import rate_table, replay_table
from scripts.bench.online.cost import cost_summary, cost_table
from scripts.bench.online.curves import compared_table
from scripts.bench.online.figures import WINDOW, Answers, moving, pooled_alpha, pooled_tau
from scripts.bench.online.measures import over_seeds, results
from scripts.bench.online.pool_tables import bound_table, pools_summary, pools_table
from scripts.bench.online.returns import returns_summary, returns_table
from scripts.bench.online.variants import variants_table

Report = dict[str, Any]
SUDDEN = ("sudden", "sudden-headers", "no-replay")
STREAMS = tuple(name for name in CURVES if name != "cold")


def tables(report: Report) -> str:
    """Markdown; what was not measured is left out."""
    rows = report["rows"]
    parts = [
        goals(rows),
        streams(rows),
        compared_table(rows),
        pairs(rows),
        bounds(rows),
        returns_table(rows),
        cost_table(rows),
        replay_table(rows),
        rate_table(rows),
        variants_table(rows),
        bound_table(rows),
        pools_table(rows),
        objectives(rows),
        trials(rows),
        system(rows),
    ]
    return "\n\n".join("\n".join(lines) for lines in parts if len(lines) > 2)


def goals(rows: Sequence[Any]) -> list[str]:
    return [*header("measure", "goal", "measured", "seeds", ""), *judged(rows)]


def judged(rows: Sequence[Any]) -> Iterator[str]:
    def told(
        what: str, goal: str, values: list[float], is_met: Callable[[Figure], bool], digits: int = 3
    ) -> Iterator[str]:
        if values:
            found = over_seeds(values)
            yield line(what, goal, found.text(digits), len(values), verdict(found, is_met))

    yield from told(
        "alpha gained after the shift to prose", ">= 0.20", measures.gains(rows), at_least(0.2)
    )
    yield from told(
        "share of the offline draft's alpha, same tokens",
        ">= 0.95",
        measures.shares_of_offline(rows),
        at_least(0.95),
    )
    for name, domain in (("sudden", SECOND), ("sudden-headers", THIRD)):
        yield from told(
            f"requests to 90 % of the final alpha, {domain}",
            "<= 500",
            measures.recoveries(rows, name, domain),
            at_most(500),
            0,
        )
        yield from told(
            f"requests to 90 % of the gain, {domain}",
            "-",
            measures.risen(rows, name, domain),
            lambda _: True,
            0,
        )
    yield from told(
        "requests from random weights to 90 % of the warm tau",
        "<= 5000",
        measures.cold_starts(rows),
        at_most(5000),
        0,
    )
    for name, how in (("sudden", ""), ("no-replay", ", without replay")):
        goal = ">= 0.95" if name == "sudden" else "-"
        yield from told(
            f"alpha on code at return / before{how}",
            goal,
            measures.returns(rows, name),
            at_least(0.95),
        )
    yield from told(
        "injected bad updates blocked",
        "1",
        measures.shares(rows, measures.is_bad, False),
        at_least(1.0),
    )
    yield from told(
        f"good updates (gain >= {measures.WORTH}) not live after 96 held-out requests", "<= 0.05",
        measures.shares(rows, measures.is_good, False), at_most(0.05),
    )  # fmt: skip
    for key, how in (
        ("alpha_candidate", "p recomputed"),
        ("alpha_logged_candidate", "logged p alone"),
    ):
        yield from told(
            f"live alpha - predicted, {how}",
            "within 0.02",
            measures.predictions(rows, SUDDEN, key),
            within(0.02),
        )


def verdict(found: Figure, is_met: Callable[[Figure], bool]) -> str:
    """Every seed's value counts; the interval says how far other seeds may lie."""
    if math.isnan(found.mean):
        return "missed: not every seed got there"
    return met(is_met(found))


def clear(low: float, high: float, goal: float) -> str:
    """Verdict on an interval: met where all of it reaches the goal."""
    return "undecided" if low < goal <= high else met(low >= goal)


def met(is_met: bool) -> str:
    return "met" if is_met else "missed"


def at_least(goal: float) -> Callable[[Figure], bool]:
    return lambda found: found.mean >= goal


def at_most(goal: float) -> Callable[[Figure], bool]:
    return lambda found: found.mean <= goal


def within(goal: float) -> Callable[[Figure], bool]:
    return lambda found: abs(found.mean) <= goal


def streams(rows: Sequence[Any]) -> list[str]:
    head = [
        "stream",
        "seeds",
        "requests",
        "alpha",
        "static alpha",
        "tau",
        *(f"{name} tau" for name in BASELINES),
    ]
    lines = header(*head, "CPU s per 1,000 requests: serving", "learning")
    for name in STREAMS:
        by_seed = measures.curves(rows, name)
        by_seed = {
            seed: answers
            for seed, answers in by_seed.items()
            if measures.baseline(rows, "static", seed, "code")
        }
        if not by_seed:
            continue
        static = [
            measures.expected(rows, "static", seed, answers)[0] for seed, answers in by_seed.items()
        ]
        taus = [
            over_seeds(
                [
                    measures.expected(rows, one, seed, answers)[1]
                    for seed, answers in by_seed.items()
                ]
            ).text(2)
            for one in BASELINES
        ]
        costs = [measures.cpu_seconds(answers) for answers in by_seed.values()]
        lines.append(
            line(
                name, len(by_seed), len(next(iter(by_seed.values()))),
                over_seeds([pooled_alpha(answers) for answers in by_seed.values()]).text(),
                over_seeds(static).text(),
                over_seeds([pooled_tau(answers) for answers in by_seed.values()]).text(2), *taus,
                f"{mean(cost[0] for cost in costs):.0f}", f"{mean(cost[1] for cost in costs):.0f}",
            )
        )  # fmt: skip
    return lines


def pairs(rows: Sequence[Any]) -> list[str]:
    """Streams of which the static draft was scored on the same texts."""
    head = ["stream", "seeds", "static alpha", "alpha", "gain", "gain without a gate", "versions"]
    lines = header(*head)
    for name in CURVES:
        found = [one for one in results(rows, "curves", name).values() if one.get("paired")]
        if not found:
            continue
        some = [one["paired"] for one in found]
        accepts = [sum(d["decision"] == "accept" for d in one["decisions"]) for one in found]
        lines.append(
            line(
                name, len(found), over_seeds([one["static"] for one in some]).text(),
                over_seeds([one["live"] for one in some]).text(),
                over_seeds([one["live"] - one["static"] for one in some]).text(),
                over_seeds([one["at_once"] - one["static"] for one in some]).text(),
                ", ".join(map(str, accepts)),
            )
        )  # fmt: skip
    return lines


def bounds(rows: Sequence[Any]) -> list[str]:
    """Gains that a stream leaves, of alpha over that of the static draft."""
    kinds = {
        "published": "as published",
        "at_once": "without a gate",
        "bank": "returning by evidence",
        "bank_at_once": "best version per domain at once",
        "own": "a draft per domain at once",
    }
    lines = header("stream", "seeds", "static alpha", *kinds.values())
    for name in CURVES:
        found = list(results(rows, BOUNDS, f"{name}-{BOUNDS}").values())
        if found:
            gains = (
                over_seeds([one[kind] - one["static"] for one in found]).text() for kind in kinds
            )
            static = over_seeds([one["static"] for one in found]).text()
            lines.append(line(name, len(found), static, *gains))
    return lines


def objectives(rows: Sequence[Any]) -> list[str]:
    found = results(rows, "objectives", "objectives")
    if not found:
        return []
    first = next(iter(found.values()))["rows"]
    divergences = list(dict.fromkeys(row["divergence"] for row in first if row["divergence"]))
    lines = header("positions", "trained", *(f"alpha gained, {name}" for name in divergences))
    for positions in dict.fromkeys(row["positions"] for row in first if row["divergence"]):
        cells = []
        for divergence in divergences:
            cells.append(
                over_seeds(
                    [gain(one["rows"], positions, divergence) for one in found.values()]
                ).text()
            )
        lines.append(
            line(
                positions,
                next(row["trained"] for row in first if row["positions"] == positions),
                *cells,
            )
        )
    return lines


def gain(rows: Sequence[Any], positions: str, divergence: str) -> float:
    static = next(row["alpha"] for row in rows if row["positions"] == "static")
    return (
        next(
            row["alpha"]
            for row in rows
            if (row["positions"], row["divergence"]) == (positions, divergence)
        )
        - static
    )


def trials(rows: Sequence[Any]) -> list[str]:
    every = [trial for some in measures.trials(rows).values() for trial in some]
    lines = header("update", "measured gain", "trials", "accepted")
    for kind in dict.fromkeys(trial["kind"] for trial in every):
        mine = [trial for trial in every if trial["kind"] == kind]
        values = sorted(measures.number(trial["gain"]) for trial in mine)
        span = "not finite" if math.isinf(values[0]) else f"{values[0]:+.3f} to {values[-1]:+.3f}"
        lines.append(
            line(kind, span, len(mine), sum(trial["decision"] == "accept" for trial in mine))
        )
    for one in measures.rollbacks(rows):
        when = (
            "not rolled back"
            if one["requests"] is None
            else f"rolled back after {one['requests']} requests"
        )
        lines.append(
            line(
                f"{one['harm']}, published past the gate",
                "-",
                1,
                f"{when}, {one['held_out']} held out",
            )
        )
    return lines


def system(rows: Sequence[Any]) -> list[str]:
    lines = header("system", "goal", "measured", "seeds", "")
    found = list(results(rows, "system", "system").values())
    if found:
        pause = over_seeds([1000 * one["pause_p99_s"] for one in found])
        swaps = [one["swaps"] for one in found]
        lines.append(
            line("swap pause p99, ms", "<= 10", pause.text(2), len(found), met(pause.mean <= 10))
        )
        lines.append(
            line(
                "swaps of a running server",
                "-",
                f"{min(swaps):.0f} to {max(swaps):.0f}",
                len(found),
                "",
            )
        )
        dropped, asked = sum(one["dropped"] for one in found), sum(one["requests"] for one in found)
        lines.append(
            line(f"dropped requests of {asked}", "0", dropped, len(found), met(dropped == 0))
        )
        rise = over_seeds([one["alpha_at_end"] - one["alpha_at_shift"] for one in found])
        lines.append(
            line(
                "alpha gained over HTTP, learner beside the server",
                "-",
                rise.text(),
                len(found),
                "",
            )
        )
    for one in results(rows, "capture", "capture").values():
        ratio, (low, high) = one["throughput"]["of_that_without"], one["throughput"]["interval"]
        lines.append(
            line(
                "tokens per second, of those without capture",
                ">= 0.98",
                f"{ratio} ({low} to {high})",
                1,
                clear(low, high, 0.98),
            )
        )
        for thread, share in one["percent_of_all_other_work"].items():
            lines.append(
                line(f"capture, % of all other work: {thread.replace('_', ' ')}", "-", share, 1, "")
            )
        size = one["bytes_a_position"]
        lines.append(line("bytes per drafted position", "<= 1024", size, 1, met(size <= 1024)))
    return lines


def summary(report: Report) -> Report:
    """The report without single requests: of a curve, pooled figures of every `WINDOW` requests in
    the order asked."""
    rows = []
    for row in report["rows"]:
        result = dict(row["result"])
        if row["cell"]["part"] == "curves":
            answers = sorted(result.pop("answers"), key=lambda one: one["number"])
            chunks = [answers[begin : begin + WINDOW] for begin in range(0, len(answers), WINDOW)]
            result["curve"] = [
                {"requests": len(some), "domain": some[-1]["domain"], "alpha": round(pooled_alpha(some), 4),
                 "tau": round(pooled_tau(some), 3)} for some in chunks
            ]  # fmt: skip
            result["published"] = sum(
                one["decision"] == "accept" for one in result.pop("decisions")
            )
        elif row["cell"]["part"] == "cost":
            result = cost_summary(result)
        elif row["cell"]["part"] == "pools":
            result = pools_summary(result)
        elif row["cell"]["part"] == RETURNS:
            result = returns_summary(result)
        elif row["cell"]["part"] == "baselines":
            result = {
                name: {
                    domain: {"alpha": pooled_alpha(some), "tau": pooled_tau(some)}
                    for domain in dict.fromkeys(one["domain"] for one in answers)
                    if (some := measures.of_domain(answers, domain))
                }
                for name, answers in result["answers"].items()
            }
        rows.append({**row, "result": result})
    return {**report, "rows": rows, "table": tables(report).splitlines()}


def draw(path: Path, report: Report) -> None:
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    rows = report["rows"]
    shown = [
        name
        for name in ("sudden", "gradual", "oscillating", "recurring")
        if measures.curves(rows, name)
    ]
    if not shown:
        return
    figure, axes = pyplot.subplots(
        1, len(shown), figsize=(4.2 * len(shown), 3.6), sharey=True, squeeze=False
    )
    for axis, name in zip(axes[0], shown, strict=True):
        for rival, style in ((name, "-"), (f"{name}-periodic", "--")):
            for seed, answers in measures.curves(rows, rival).items():
                label = "learning" if style == "-" else "retrained every 250"
                curve(axis, answers, style, label if seed == 0 else None)
        static_line(axis, rows, next(iter(measures.curves(rows, name).values())))
        axis.set_title(name)
        axis.set_xlabel("requests")
    axes[0][0].set_ylabel(f"alpha of the latest {WINDOW} requests")
    axes[0][0].legend()
    figure.tight_layout()
    figure.savefig(path, dpi=110)
    pyplot.close(figure)


def curve(axis: Any, answers: Answers, style: str, label: str | None) -> None:
    ordered = sorted(answers, key=lambda one: one["number"])
    colour = "tab:blue" if style == "-" else "tab:orange"
    axis.plot(
        moving(ordered, pooled_alpha), style, color=colour, alpha=0.7, linewidth=1, label=label
    )


def static_line(axis: Any, rows: Sequence[Any], answers: Answers) -> None:
    """Its mean over seeds, by domain."""
    ordered = sorted(answers, key=lambda one: one["number"])
    seeds = results(rows, "baselines", "baselines")
    level = {}
    for domain in {one["domain"] for one in ordered}:
        some = [
            pooled_alpha(found)
            for seed in seeds
            if (found := measures.baseline(rows, "static", seed, domain))
        ]
        level[domain] = mean(some) if some else math.nan
    values = [level[one["domain"]] for one in ordered]
    smooth = [mean(values[max(0, end - WINDOW + 1) : end + 1]) for end in range(len(values))]
    axis.plot(smooth, color="black", linewidth=1, label="static")
