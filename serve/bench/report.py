"""Figures of a bench run: per (temperature, mode) speed and acceptance, and the ratio of the modes;
the same by task of a suite, off beside on, as a table in Markdown."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import numpy as np

from draftsmith.client import COUNTER
from draftsmith.files import markdown_table, with_interval
from draftsmith.kernels.acceptance import AcceptanceCounts, DraftCost, bootstrap_ratio
from draftsmith.serve.bench.client import PassResult, TimedAnswer

Figures = dict[str, Any]
ALL = "all tasks"
HEAD = ("T", "users", "task", "prompts", "off", "on", "speed-up", "tok/pass", "tau", "alpha_1 ...")
INTERVALS = (
    "off, on: tok/s of a user, tokens over the time of their requests; tok/pass: tokens a target "
    "pass; tau, alpha: of the rounds that drafted; [ ]: 95 % intervals, bootstrap over prompts"
)


@dataclass
class BenchCase:
    temperature: float
    mode: str
    passes: list[PassResult]
    concurrency: int = 1

    @property
    def answers(self) -> list[TimedAnswer]:
        return [answer for one in self.passes for answer in one.answers if not answer.refused]


def cost_of(step_bytes: Mapping[str, float]) -> DraftCost | None:
    """Cost in units of a target pass; None where the server does not report all of it."""
    if not {"target_pass", *DraftCost._fields} <= step_bytes.keys():
        return None
    return DraftCost(*(step_bytes[name] / step_bytes["target_pass"] for name in DraftCost._fields))


def figures(case: BenchCase, *, draft_cost: DraftCost | None = None) -> Figures:
    answers = case.answers
    reports = reports_of(answers)
    tpots = [answer.tpot_s for answer in answers if answer.tpot_s is not None]
    speeds = [one.tokens_per_s for one in case.passes]
    wall_s = sum(one.wall_s for one in case.passes)
    return {
        "temperature": case.temperature,
        "mode": case.mode,
        "concurrency": case.concurrency,
        "num_answers": len(answers),
        "num_tokens": sum(answer.num_tokens for answer in answers),
        "tokens_per_s": sum(one.num_tokens for one in case.passes) / wall_s,
        "tokens_per_s_passes": speeds,
        "tokens_per_s_user": speed(answers),
        "ttft_ms": percentiles([answer.ttft_s for answer in answers]),
        "tpot_ms": percentiles(tpots),
        "e2el_ms": percentiles([answer.e2el_s for answer in answers]),
        "acceptance": acceptance(reports, draft_cost=draft_cost) if reports else counted(case),
    }


def counted(case: BenchCase) -> Figures | None:
    """tau and alpha_i of a server that reports on no answer, by the counters that vLLM and ours
    share: of all requests that it answered meanwhile, without interval, ends not trimmed."""
    scrapes = [scrape for one in case.passes for scrape in one.counted]

    def total(name: str, **labels: str) -> float:
        return sum(one.total(COUNTER.format(name), **labels) for one in scrapes)

    if (drafts := total("drafts")) == 0:
        return None
    by_place, tau = "accepted_tokens_per_pos", 1 + total("accepted_tokens") / drafts
    places = {place for one in scrapes for place in one.by(COUNTER.format(by_place), "position")}
    kept = [drafts, *(total(by_place, position=place) for place in sorted(places, key=int))]
    alpha = [after / before if before else None for before, after in pairwise(kept)]
    return {"rounds": drafts, "tau": tau, "tau_95": [tau, tau], "alpha": alpha}


def speed(answers: Sequence[TimedAnswer]) -> float:
    """Tokens a second of a request's time, which is what a user waits for."""
    return sum(one.num_tokens for one in answers) / sum(one.e2el_s for one in answers)


def reports_of(answers: Sequence[TimedAnswer]) -> list[list[Figures]]:
    """Reports of the answers to each prompt: its turns, and its repetitions in other passes."""
    found: dict[int, list[Figures]] = {}
    for answer in answers:
        if answer.report:
            found.setdefault(answer.prompt, []).append(answer.report)
    return list(found.values())


def percentiles(seconds: Sequence[float]) -> Figures:
    """Percentiles in milliseconds, by nearest rank; None without a time."""
    shares = (50, 95, 99)
    found = np.percentile(seconds, shares, method="inverted_cdf") if seconds else None
    return {
        f"p{share}": None if found is None else 1e3 * float(found[at])
        for at, share in enumerate(shares)
    }


def acceptance(
    prompts: Sequence[Sequence[Figures]], *, draft_cost: DraftCost | None = None
) -> Figures | None:
    """alpha_i and tau of rounds that drafted, from the reports of each prompt's answers. tau's
    interval resamples whole prompts: rounds of an answer depend, and greedy answers repeat.

    `block_efficiency` is tau before an answer's end trims its last round. `mbsu`, the memory-bound
    speed-up, is what it would bring where time is the reading of weights: block efficiency over
    what a round reads, in target passes.
    """
    drafted = [[report for report in reports if report["per_step_drafted"]] for reports in prompts]
    reports = [report for one in drafted for report in one]
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
    sizes = [
        [size for report in one for size in report["per_step_committed"]] for one in drafted if one
    ]
    committed, rounds = [float(sum(one)) for one in sizes], [float(len(one)) for one in sizes]
    return {**counts.to_dict(), **sizing, "tau_95": list(bootstrap_ratio(committed, rounds))}


def ratios(cases: Sequence[Figures]) -> list[Figures]:
    """Ratio of each drafting mode to off: of all passes together, and the lowest and highest of the
    paired passes."""
    return [_ratio(case, off) for off, case in pairs(cases)]


def pairs(cases: Sequence[Figures]) -> list[tuple[Figures, Figures]]:
    """Each drafting case behind the one that is off, at the same temperature and concurrency."""
    off = {_place(case): case for case in cases if case["mode"] == "off"}
    return [
        (off[_place(case)], case)
        for case in cases
        if case["mode"] not in ("off", "plain") and _place(case) in off
    ]


def _place(case: Figures) -> tuple[float, int]:
    return case["temperature"], case["concurrency"]


def _ratio(drafting: Figures, off: Figures) -> Figures:
    passes = [
        on / plain for on, plain in zip(drafting["tokens_per_s_passes"], off["tokens_per_s_passes"])
    ]
    accepted = drafting["acceptance"] or {}
    return {
        "temperature": drafting["temperature"],
        "mode": drafting["mode"],
        "concurrency": drafting["concurrency"],
        "speedup": drafting["tokens_per_s"] / off["tokens_per_s"],
        "lowest": min(passes),
        "highest": max(passes),
        **{name: accepted.get(name) for name in ("block_efficiency", "mbsu")},
    }


def table(cases: Sequence[Figures]) -> str:
    wide = max(6, *(len(case["mode"]) for case in cases))
    is_sweep = len({case["concurrency"] for case in cases}) > 1
    users = f" {'users':>5} {'tok/s/user':>10}" if is_sweep else ""
    head = (
        f"{'T':>4} {'mode':>{wide}}{users} {'tok/s':>9} {'TTFT p50/p95 ms':>17} "
        f"{'TPOT p50/p95 ms':>17} {'tau':>18}  alpha_i"
    )
    lines = [head]
    for case in cases:
        tau, alphas = accepted(case["acceptance"])
        users = f" {case['concurrency']:>5} {case['tokens_per_s_user']:>10.1f}" if is_sweep else ""
        lines.append(
            f"{case['temperature']:>4g} {case['mode']:>{wide}}{users} {case['tokens_per_s']:>9.1f} "
            f"{_pair(case['ttft_ms']):>17} {_pair(case['tpot_ms']):>17} {tau:>18}  {alphas}"
        )
    is_one = len(cases[0]["tokens_per_s_passes"]) == 1
    for ratio in ratios(cases):
        spread = f"{ratio['lowest']:.2f} to {ratio['highest']:.2f} by pass"
        users = f", {ratio['concurrency']} users" if is_sweep else ""
        lines.append(
            f"T = {ratio['temperature']:g}{users}: "
            f"speculation {ratio['mode']} / off = {ratio['speedup']:.2f} "
            f"({'one pass' if is_one else spread}){_bound(ratio)}"
        )
    return "\n".join(lines)


def accepted(found: Figures | None) -> tuple[str, str]:
    """tau with its interval, and alpha by draft position."""
    if found is None:
        return "-", "-"
    alphas = " ".join("-" if alpha is None else f"{alpha:.2f}" for alpha in found["alpha"])
    return with_interval(found["tau"], *found["tau_95"]), alphas


def _bound(ratio: Figures) -> str:
    if ratio["mbsu"] is None:
        return ""
    return (
        f"; {ratio['mbsu']:.2f} where reading weights takes all the time (MBSU), by "
        f"{ratio['block_efficiency']:.2f} tokens a pass"
    )


def _pair(values: Figures) -> str:
    known = (values["p50"], values["p95"])
    return " / ".join("-" if value is None else f"{value:.1f}" for value in known)


def by_task(case: BenchCase) -> dict[str, Figures]:
    """Figures of each task of the suite, in its order, and of all together; tokens and seconds by
    prompt, all its turns and passes together."""
    groups: dict[str, list[TimedAnswer]] = {}
    for answer in case.answers:
        groups.setdefault(answer.task, []).append(answer)
    return {task: _figures(answers) for task, answers in groups.items()} | {
        ALL: _figures(case.answers)
    }


def _figures(answers: Sequence[TimedAnswer]) -> Figures:
    tokens: dict[int, float] = {}
    seconds: dict[int, float] = {}
    for answer in answers:
        tokens[answer.prompt] = tokens.get(answer.prompt, 0.0) + answer.num_tokens
        seconds[answer.prompt] = seconds.get(answer.prompt, 0.0) + answer.e2el_s
    return {
        "tokens": list(tokens.values()),
        "seconds": list(seconds.values()),
        "tokens_per_s_user": speed(answers),
        "tokens_per_s_user_95": list(
            bootstrap_ratio(list(tokens.values()), list(seconds.values()))
        ),
        "tokens_per_pass": _tokens_per_pass(answers),
        "acceptance": acceptance(reports_of(answers)),
    }


def _tokens_per_pass(answers: Sequence[TimedAnswer]) -> float | None:
    reports = [answer.report for answer in answers if answer.report]
    passes = sum(report["num_target_passes"] for report in reports)
    return sum(report["num_committed_tokens"] for report in reports) / passes if passes else None


def speedups(cases: Sequence[Figures]) -> list[Figures]:
    """Speed-up of each task over off, prompts of both drawn together for the interval."""
    found = []
    for off, on in pairs(cases):
        tasks = {
            task: {
                "speedup": own["tokens_per_s_user"] / plain["tokens_per_s_user"],
                "speedup_95": list(
                    bootstrap_ratio(
                        own["tokens"], own["seconds"], plain["tokens"], plain["seconds"]
                    )
                ),
            }
            for (task, own), plain in zip(on["tasks"].items(), off["tasks"].values(), strict=True)
        }
        place = {name: on[name] for name in ("temperature", "mode", "concurrency")}
        found.append({**place, "tasks": tasks})
    return found


def markdown(cases: Sequence[Figures], about: Sequence[str]) -> str:
    """Table with a row for each task, and the lines that say what was measured."""
    gained = {_task_place(one): one["tasks"] for one in speedups(cases)}
    plain = {_task_place(on): off["tasks"] for off, on in pairs(cases)}
    beside = [off for off, _ in pairs(cases)]
    # What a case is off beside has a column there.
    shown = [case for case in cases if not any(case is one for one in beside)]
    named = len({case["mode"] for case in shown}) > 1
    rows: list[Sequence[str]] = []
    for case in shown:
        place = _task_place(case)
        off: Figures = case["tasks"] if case["mode"] == "off" else plain.get(place, {})
        for task, own in case["tasks"].items():
            ratio = gained[place][task] if place in gained else None
            rows.append(
                (
                    f"{case['temperature']:g}",
                    str(case["concurrency"]),
                    f"{task} ({case['mode']})" if named and case["mode"] != "on" else task,
                    str(len(own["tokens"])),
                    _speed(off.get(task)),
                    _speed(None if case["mode"] == "off" else own),
                    with_interval(ratio["speedup"], *ratio["speedup_95"]) if ratio else "-",
                    _short(own["tokens_per_pass"]),
                    *accepted(own["acceptance"]),
                )
            )
    return (
        "\n".join([*markdown_table(HEAD, rows), "", *(f"* {line}" for line in (*about, INTERVALS))])
        + "\n"
    )


def _task_place(case: Figures) -> tuple[float, str, int]:
    return case["temperature"], case["mode"], case["concurrency"]


def _speed(own: Figures | None) -> str:
    if own is None:
        return "-"
    return with_interval(own["tokens_per_s_user"], *own["tokens_per_s_user_95"], digits=1)


def _short(value: float | None) -> str:
    return "-" if value is None else f"{value:.2f}"
