"""Lines of a fleet in a terminal."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from draftsmith.fleet.rollout.view import View
from draftsmith.progress import duration

HEADS = ("engine", "version", "alpha", "tau", "tok/s", "z", "last swap", "seen", "note")


def lines(view: View) -> list[str]:
    table = [HEADS, *(cells(row) for row in view["engines"])]
    widths = [max(len(line[column]) for line in table) for column in range(len(HEADS) - 1)]
    return [
        *summary(view),
        *(
            "  ".join([*map(str.ljust, line, widths), line[-1]]).rstrip()
            for line in (table if view["engines"] else ())
        ),
    ]


def summary(view: View) -> list[str]:
    live = "no version is live" if view["current"] is None else f"version {view['current']} is live"
    served = ", ".join(
        f"{count} on {'no version' if version == 'None' else f'version {version}'}"
        for version, count in view["served"].items()
    )
    silent = sum(row["is_silent"] for row in view["engines"])
    parts = [live, served or "no engine", *([f"{silent} silent"] if silent else [])]
    return ["; ".join(parts), *rollout_lines(view["rollout"])]


def rollout_lines(rollout: Any) -> list[str]:
    if not rollout:
        return []
    share = rollout["stages"][rollout["stage"] - 1]
    trial = rollout["trial"]
    found = ""
    if trial.get("pairs"):
        found = f"; gain {trial['gain']:+.4f} in {trial['pairs']} pairs of periods"
    elif trial.get("is_blind"):
        found = "; waits: too few requests of both versions are in the buffer"
    return [
        f"version {rollout['candidate']} is tried on {len(rollout['engines'])} engines, stage "
        f"{rollout['stage']} of {len(rollout['stages'])} ({share:.0%}), for "
        f"{duration(rollout['age_s'])}{found}"
    ]


def cells(row: View) -> tuple[str, ...]:
    swap = row["last_swap"] or {}
    return (
        str(row["engine"]),
        "-" if row["version"] is None else str(row["version"]),
        number(row["alpha"], ".3f"),
        number(row["tau"], ".2f"),
        number(row["tokens_per_s"], ".0f"),
        number(row["z"], "+.1f"),
        number(swap.get("pause_ms"), ".1f", " ms") if swap.get("ok", True) else "failed",
        f"{duration(row['age_s'])} ago",
        note(row),
    )


def note(row: View) -> str:
    parts = ["silent"] if row["is_silent"] else []
    if row["alarm"]:
        parts.append("samples another distribution than the target's")
    if row["wanted"] is not None and row["wanted"] != row["version"]:
        parts.append(f"should serve {row['wanted']}")
    refused: Sequence[tuple[str, str]] = sorted(
        row["refused"].items(), key=lambda one: int(one[0]), reverse=True
    )
    parts += [f"refused {version}: {reason}" for version, reason in refused[:1]]
    return "; ".join(parts)


def number(value: Any, form: str, unit: str = "") -> str:
    return f"{value:{form}}{unit}" if isinstance(value, (int, float)) else "-"
