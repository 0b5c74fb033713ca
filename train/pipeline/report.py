"""Page of a pipeline: stages with their times, and the acceptance that its evaluations found.

tau is the paper's block efficiency: committed tokens per target pass.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol

from draftsmith.files import markdown_table, read_json, write_text
from draftsmith.progress import duration
from draftsmith.train.pipeline.recipe import Stage

STAGES = ("stage", "command", "state", "time", "result")
FIGURES = ("stage", "draft", "data", "T", "k", "tau", "MBSU", "alpha_1, ...")


class StageRecord(Protocol):
    begun: int
    seconds: float
    finished: float | None
    status: int | None


def write_report(
    stages: Sequence[Stage], record: Mapping[str, StageRecord], out: Path, title: str
) -> None:
    rows = [stage_row(stage, record.get(stage.name), out) for stage in stages]
    lines = [f"# {title}", "", *markdown_table(STAGES, rows), ""]
    figures = [
        figures_row(stage, found)
        for stage in stages
        if stage.command == "eval" and stage.result is not None and stage.result.is_file()
        for found in read_json(stage.result, f"result of stage {stage.name!r}")["evaluation"]
    ]
    if figures:
        lines += ["## Acceptance", "", *markdown_table(FIGURES, figures), ""]
    write_text(out / "report.md", "\n".join(lines))


def stage_row(stage: Stage, one: StageRecord | None, out: Path) -> tuple[str, ...]:
    result = "-" if stage.result is None else f"`{stage.result.relative_to(out)}`"
    if one is None:
        return (stage.name, stage.command, "not begun", "-", result)
    ended = f"ended with status {one.status}" if one.status else "not finished"
    state = ended if one.finished is None else "finished"
    state += f", start {one.begun}" if one.begun > 1 else ""
    return (stage.name, stage.command, state, duration(one.seconds), result)


def figures_row(stage: Stage, found: dict[str, Any]) -> tuple[str, ...]:
    """Figures of a draft, data and temperature; results of stages by their names."""
    tau, read = found["tau"], stage.recorded
    several = read["data"] if isinstance(read["data"], list) else [read["data"]]
    return (
        stage.name,
        *(re.sub(r"[${}]", "", one) for one in (read["draft"], ", ".join(several))),
        f"{found['temperature']:g}",
        str(found["k"]),
        f"{tau['value']:.2f} ({tau['low']:.2f}-{tau['high']:.2f})",
        "-" if found.get("mbsu") is None else f"{found['mbsu']:.2f}",
        " ".join("-" if one is None else f"{one['value']:.3f}" for one in found["alpha"]),
    )
