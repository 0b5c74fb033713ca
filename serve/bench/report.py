"""Figures of a bench run: per (temperature, mode) speed and acceptance, and the ratio
of the modes."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from draftsmith.errors import UserError
from draftsmith.kernels.acceptance import AcceptanceCounts, DraftCost, bootstrap_ratio
from draftsmith.serve.bench.client import Answer, PassResult

LATENCIES: dict[str, Callable[[Answer], float]] = {
    "ttft": lambda answer: answer.ttft_s,
    "tpot": lambda answer: answer.tpot_s or 0.0,
    "e2el": lambda answer: answer.e2el_s,
}
Goal = dict[str, float]  # milliseconds by latency


def goal_of(words: Sequence[str]) -> Goal:
    """["ttft:200", "tpot:50"] -> {"ttft": 200.0, "tpot": 50.0}."""
    goal = {}
    for word in words:
        name, _, limit = word.partition(":")
        try:
            goal[name] = float(limit)
        except ValueError:
            goal[name] = 0.0
        if name not in LATENCIES or goal[name] <= 0:
            raise UserError(
                f"goodput {word!r} is no limit; give {', '.join(LATENCIES)} with milliseconds, "
                "for example ttft:200"
            )
    return goal


def keeps(answer: Answer, goal: Goal) -> bool:
    return all(1e3 * LATENCIES[name](answer) <= limit for name, limit in goal.items())


Figures = dict[str, Any]


@dataclass
class Case:
    temperature: float
    mode: str
    passes: list[PassResult]


def cost_of(step_bytes: Mapping[str, float]) -> DraftCost | None:
    """Cost in units of a target pass; None where the server does not report all of it."""
    if not {"target_pass", *DraftCost._fields} <= step_bytes.keys():
        return None
    return DraftCost(*(step_bytes[name] / step_bytes["target_pass"] for name in DraftCost._fields))


def percentile(values: Sequence[float], share: float) -> float:
    """Nearest rank; NaN without values."""
    if not values:
        return math.nan
    return sorted(values)[min(len(values) - 1, math.ceil(share * len(values)) - 1)]


def figures(
    case: Case, *, goal: Goal | None = None, draft_cost: DraftCost | None = None
) -> Figures:
    answers = [answer for one in case.passes for answer in one.answers]
    tpots = [answer.tpot_s for answer in answers if answer.tpot_s is not None]
    speeds = [one.tokens_per_s for one in case.passes]
    wall_s = sum(one.wall_s for one in case.passes)
    return {
        "temperature": case.temperature,
        "mode": case.mode,
        "num_answers": len(answers),
        "num_tokens": sum(answer.num_tokens for answer in answers),
        "tokens_per_s": sum(one.num_tokens for one in case.passes) / wall_s,
        "tokens_per_s_passes": speeds,
        "ttft_ms": percentiles([answer.ttft_s for answer in answers]),
        "tpot_ms": percentiles(tpots),
        "e2el_ms": percentiles([answer.e2el_s for answer in answers]),
        "goodput": goodput(answers, goal, wall_s) if goal else None,
        "acceptance": acceptance(
            [answer.report for answer in answers if answer.report], draft_cost=draft_cost
        ),
    }


def percentiles(seconds: Sequence[float]) -> Figures:
    """Percentiles in milliseconds."""
    return {f"p{share}": 1e3 * percentile(seconds, share / 100) for share in (50, 95, 99)}


def goodput(answers: Sequence[Answer], goal: Goal, wall_s: float) -> Figures:
    good = [answer for answer in answers if keeps(answer, goal)]
    return {
        "goal_ms": goal,
        "share": len(good) / len(answers),
        "requests_per_s": len(good) / wall_s,
        "tokens_per_s": sum(answer.num_tokens for answer in good) / wall_s,
    }


def acceptance(
    reports: Sequence[Figures], *, draft_cost: DraftCost | None = None
) -> Figures | None:
    """alpha_i and tau of rounds that drafted; tau's interval resamples whole answers, whose rounds
    depend.

    `block_efficiency` is tau before an answer's end trims its last round. `mbsu`, the memory-bound
    speed-up, is what it would bring where time is the reading of weights: block efficiency over
    what a round reads, in target passes.
    """
    reports = [report for report in reports if report["per_step_drafted"]]
    if not reports:
        return None
    counts = AcceptanceCounts()
    for report in reports:
        counts.add(
            report["per_step_drafted"], report["per_step_accepted"], report["per_step_committed"]
        )
    num_rounds = sum(len(report["per_step_drafted"]) for report in reports)
    efficiency = 1 + sum(sum(report["per_step_accepted"]) for report in reports) / num_rounds
    depth = sum(sum(report["per_step_drafted"]) for report in reports) / num_rounds
    sizing = {
        "block_efficiency": efficiency,
        "mbsu": None if draft_cost is None else draft_cost.memory_bound(efficiency, depth),
    }
    committed = [float(sum(report["per_step_committed"])) for report in reports]
    rounds = [float(len(report["per_step_committed"])) for report in reports]
    return {**counts.to_dict(), **sizing, "tau_95": list(bootstrap_ratio(committed, rounds))}


def ratios(cases: Sequence[Figures]) -> list[Figures]:
    """Ratio of each drafting mode to off at each temperature: of all passes together, and the
    lowest and highest of the paired passes."""
    found = []
    for temperature in dict.fromkeys(case["temperature"] for case in cases):
        of = {case["mode"]: case for case in cases if case["temperature"] == temperature}
        found += [
            _ratio(case, of["off"])
            for mode, case in of.items()
            if "off" in of and mode not in ("off", "plain")
        ]
    return found


def _ratio(drafting: Figures, off: Figures) -> Figures:
    pairs = [
        on / plain for on, plain in zip(drafting["tokens_per_s_passes"], off["tokens_per_s_passes"])
    ]
    accepted = drafting["acceptance"] or {}
    return {
        "temperature": drafting["temperature"],
        "mode": drafting["mode"],
        "speedup": drafting["tokens_per_s"] / off["tokens_per_s"],
        "lowest": min(pairs),
        "highest": max(pairs),
        **{name: accepted.get(name) for name in ("block_efficiency", "mbsu")},
    }


def table(cases: Sequence[Figures]) -> str:
    wide = max(6, *(len(case["mode"]) for case in cases))
    head = (
        f"{'T':>4} {'mode':>{wide}} {'tok/s':>9} {'TTFT p50/p95 ms':>17} {'TPOT p50/p95 ms':>17} "
        f"{'tau':>18}  alpha_i"
    )
    lines = [head]
    for case in cases:
        ttft, tpot, found = case["ttft_ms"], case["tpot_ms"], case["acceptance"]
        tau = alphas = "-"
        if found is not None:
            low, high = found["tau_95"]
            tau = f"{found['tau']:.2f} [{low:.2f}, {high:.2f}]"
            alphas = " ".join("-" if alpha is None else f"{alpha:.2f}" for alpha in found["alpha"])
        speed = f"{case['temperature']:>4g} {case['mode']:>{wide}} {case['tokens_per_s']:>9.1f}"
        lines.append(f"{speed} {_pair(ttft):>17} {_pair(tpot):>17} {tau:>18}  {alphas}")
        if case["goodput"] is not None:
            lines.append(_good(case["goodput"]))
    for ratio in ratios(cases):
        spread = f"{ratio['lowest']:.2f} to {ratio['highest']:.2f} by pass"
        lines.append(
            f"T = {ratio['temperature']:g}: "
            f"speculation {ratio['mode']} / off = {ratio['speedup']:.2f} "
            f"({spread}){_bound(ratio)}"
        )
    return "\n".join(lines)


def _bound(ratio: Figures) -> str:
    if ratio["mbsu"] is None:
        return ""
    return (
        f"; memory-bound it would be {ratio['mbsu']:.2f}, block efficiency "
        f"{ratio['block_efficiency']:.2f}"
    )


def _good(found: Figures) -> str:
    limits = ", ".join(f"{name} <= {limit:g} ms" for name, limit in found["goal_ms"].items())
    return (
        f"{'':>12}{found['share']:.0%} of answers keep {limits}: {found['requests_per_s']:.2f} "
        "requests/s"
    )


def _pair(values: Figures) -> str:
    return f"{values['p50']:.1f} / {values['p95']:.1f}"


def draw(cases: Sequence[Figures], path: str | Path) -> None:
    """Draw tok/s of the cases beside each other, and alpha by draft position."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, (speed, depth) = pyplot.subplots(1, 2, figsize=(9, 3.6))
    names = [f"{case['mode']}\nT = {case['temperature']:g}" for case in cases]
    colours = ["tab:grey" if case["mode"] == "off" else "tab:blue" for case in cases]
    speed.bar(names, [case["tokens_per_s"] for case in cases], color=colours)
    speed.set_ylabel("tokens / s")
    for case in cases:
        if case["acceptance"] is not None:
            alphas = [math.nan if alpha is None else alpha for alpha in case["acceptance"]["alpha"]]
            label = f"T = {case['temperature']:g}, tau = {case['acceptance']['tau']:.2f}"
            depth.plot(range(1, len(alphas) + 1), alphas, marker="o", label=label)
    depth.set(xlabel="draft position", ylabel="alpha", ylim=(0, 1))
    if depth.lines:
        depth.legend()
    figure.tight_layout()
    figure.savefig(path, dpi=120, format="png")
    pyplot.close(figure)
