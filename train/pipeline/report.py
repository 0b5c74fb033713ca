"""Page of a pipeline: stages with their times, and the figures that eval, bench and distill left.

tau of `eval` is the paper's block efficiency: committed tokens per target pass.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from draftsmith.drafters.published import versions
from draftsmith.files import read_json, write_text
from draftsmith.progress import duration
from draftsmith.train.pipeline.record import Record
from draftsmith.train.pipeline.stage import Stage


def write_report(stages: Sequence[Stage], record: Record, out: Path, title: str) -> None:
    parts = [
        [f"# {title}", ""],
        stage_table(stages, record, out),
        evaluations(_finished("eval", stages, record), out),
        benches(_finished("bench", stages, record)),
        decisions(_finished("distill", stages, record)),
    ]
    write_text(out / "report.md", "\n".join(line for part in parts for line in part))


def _finished(command: str, stages: Sequence[Stage], record: Record) -> list[Stage]:
    done = record.finished()
    return [one for one in stages if one.command == command and one.name in done]


def table(head: Sequence[str], rows: Iterable[Sequence[str]]) -> list[str]:
    """A Markdown table and an empty line; nothing without rows."""
    lines = ["| " + " | ".join(row) + " |" for row in rows]
    if not lines:
        return []
    return ["| " + " | ".join(head) + " |", "|" + "---|" * len(head), *lines, ""]


def stage_table(stages: Sequence[Stage], record: Record, out: Path) -> list[str]:
    rows = []
    for stage in stages:
        one = record.stages.get(stage.name)
        if one is None:
            state, time = "not begun", "-"
        else:
            ended = f"ended with status {one.status}" if one.status else "not finished"
            state = ended if one.finished is None else "finished"
            state += f", start {one.begun}" if one.begun > 1 else ""
            time = duration(one.seconds)
        result = "-" if stage.result is None else f"`{stage.result.relative_to(out)}`"
        rows.append((stage.name, stage.command, state, time, result))
    return table(("stage", "command", "state", "time", "result"), rows)


def evaluations(stages: Sequence[Stage], out: Path) -> list[str]:
    """A row per evaluated draft, data and temperature."""
    rows = []
    for stage in stages:
        for found in _read(stage).get("evaluation", []):
            alphas = " ".join(
                "-" if one is None else _number(one["value"], 3) for one in found["alpha"]
            )
            tau = found["tau"]
            rows.append(
                (
                    stage.name,
                    *(_named(stage.recorded[name]) for name in ("draft", "data")),
                    f"{found['temperature']:g}",
                    str(found["k"]),
                    f"{tau['value']:.2f} ({tau['low']:.2f}-{tau['high']:.2f})",
                    _number(found.get("mbsu"), 2),
                    alphas,
                )
            )
    head = ("stage", "draft", "data", "T", "k", "tau = block efficiency", "MBSU", "alpha_1, ...")
    shown = table(head, rows)
    return ["## Acceptance", "", *shown] if shown else []


def benches(stages: Sequence[Stage]) -> list[str]:
    """A row per temperature and mode."""
    rows = []
    for stage in stages:
        found = _read(stage)
        speeds = {
            (one["temperature"], one["mode"]): one["speedup"] for one in found.get("ratios", [])
        }
        for case in found.get("cases", []):
            accepted = case["acceptance"] or {}
            speed = speeds.get((case["temperature"], case["mode"]))
            rows.append(
                (
                    stage.name,
                    f"{case['temperature']:g}",
                    case["mode"],
                    _number(case["tokens_per_s"], 1),
                    _number(speed, 2),
                    *(_number(accepted.get(one), 2) for one in ("tau", "block_efficiency", "mbsu")),
                )
            )
    head = ("stage", "T", "mode", "tok/s", "of off", "tau", "block efficiency", "MBSU")
    shown = table(head, rows)
    return ["## Speed", "", *shown] if shown else []


def decisions(stages: Sequence[Stage]) -> list[str]:
    """Decisions of a learner, counted."""
    rows = []
    for stage in stages:
        assert stage.result is not None
        counts = Counter(one["decision"] for one in versions.read_decisions(stage.result))
        rows.append((stage.name, ", ".join(f"{name} {n}" for name, n in counts.items()) or "none"))
    shown = table(("stage", "decisions"), rows)
    return ["## Learning", "", *shown] if shown else []


def _read(stage: Stage) -> dict[str, Any]:
    assert stage.result is not None
    return (
        read_json(stage.result, f"result of stage {stage.name!r}") if stage.result.is_file() else {}
    )


def _named(value: Any) -> str:
    """A result by the name of its stage, other paths as they stand in the recipe."""
    several = value if isinstance(value, list) else [value]
    return ", ".join(str(one).replace("${", "").replace("}", "") for one in several)


def _number(value: float | None, digits: int) -> str:
    return "-" if value is None else f"{value:.{digits}f}"
