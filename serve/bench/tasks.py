"""Figures of a bench run by task of a suite, off beside on, as a table in Markdown."""

from __future__ import annotations

from collections.abc import Sequence

from draftsmith.files import markdown_table
from draftsmith.kernels.acceptance import bootstrap_ratio, bootstrap_ratios
from draftsmith.serve.bench.client import TimedAnswer
from draftsmith.serve.bench.report import (
    BenchCase,
    Figures,
    acceptance,
    accepted,
    pairs,
    reports_of,
    speed,
)

ALL = "all tasks"
HEAD = ("T", "users", "task", "prompts", "off", "on", "speed-up", "tok/pass", "tau", "alpha_1 ...")
INTERVALS = (
    "off, on: tok/s of a user, tokens over the time of their requests; tok/pass: tokens a target "
    "pass; tau, alpha: of the rounds that drafted; [ ]: 95 % intervals, bootstrap over prompts"
)


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
                    bootstrap_ratios(
                        (own["tokens"], own["seconds"]), (plain["tokens"], plain["seconds"])
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
    gained = {_place(one): one["tasks"] for one in speedups(cases)}
    plain = {_place(on): off["tasks"] for off, on in pairs(cases)}
    beside = [off for off, _ in pairs(cases)]
    # What a case is off beside has a column there.
    shown = [case for case in cases if not any(case is one for one in beside)]
    named = len({case["mode"] for case in shown}) > 1
    rows: list[Sequence[str]] = []
    for case in shown:
        place = _place(case)
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
                    _with_interval(ratio["speedup"], ratio["speedup_95"], 2) if ratio else "-",
                    _short(own["tokens_per_pass"]),
                    *accepted(own["acceptance"]),
                )
            )
    return (
        "\n".join([*markdown_table(HEAD, rows), "", *(f"* {line}" for line in (*about, INTERVALS))])
        + "\n"
    )


def _place(case: Figures) -> tuple[float, str, int]:
    return case["temperature"], case["mode"], case["concurrency"]


def _speed(own: Figures | None) -> str:
    if own is None:
        return "-"
    return _with_interval(own["tokens_per_s_user"], own["tokens_per_s_user_95"], 1)


def _short(value: float | None) -> str:
    return "-" if value is None else f"{value:.2f}"


def _with_interval(value: float, interval: Sequence[float], digits: int) -> str:
    low, high = interval
    return f"{value:.{digits}f} [{low:.{digits}f}, {high:.{digits}f}]"
