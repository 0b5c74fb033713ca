"""Page of a fleet: one HTML file without scripts, which a browser loads again by itself."""

from __future__ import annotations

import time
from collections.abc import Sequence
from html import escape

from draftsmith.fleet.rollout.table import HEADS, cells, summary
from draftsmith.fleet.rollout.view import View

STYLE = """
:root { color-scheme: light dark; --line: #8884; --faint: #8889; --bad: #c0392b; }
body { font: 14px/1.5 system-ui, sans-serif; margin: 1.5rem auto; max-width: 1240px; padding: 0 14px; }
h1 { font-size: 19px; margin: 0 0 .5rem; } h2 { font-size: 14px; margin: 1.5rem 0 .3rem; }
p { margin: 0 0 .3rem; } small { color: var(--faint); }
table { border-collapse: collapse; width: 100%; font-variant-numeric: tabular-nums; }
th, td { text-align: left; padding: 3px 12px 3px 0; border-bottom: 1px solid var(--line); }
th { color: var(--faint); font-weight: normal; font-size: 12px; }
td:last-child { color: var(--bad); }
"""  # noqa: E501


def html(view: View, *, every_s: float | None = None) -> str:
    refresh = f'<meta http-equiv="refresh" content="{every_s:g}">' if every_s else ""
    at = time.strftime("%Y-%m-%d %H:%M:%S UTC", time.gmtime(view["at_s"]))
    return (
        '<!DOCTYPE html>\n<html lang="en"><head><meta charset="utf-8">'
        '<meta name="viewport" content="width=device-width, initial-scale=1">'
        f"{refresh}<title>draftsmith fleet</title><style>{STYLE}</style></head><body>\n"
        f"<h1>Fleet <small>{escape(str(view['versions']))}, {at}</small></h1>\n"
        + "".join(f"<p>{escape(line)}</p>\n" for line in summary(view))
        + engines(view)
        + decisions(view)
        + "</body></html>\n"
    )


def engines(view: View) -> str:
    return table(HEADS, [cells(row) for row in view["engines"]])


def decisions(view: View) -> str:
    rows = [
        (
            time.strftime("%m-%d %H:%M:%S", time.gmtime(one.get("time_s") or 0)),
            str(one.get("decision", "")),
            str(one.get("version", "")),
            str(one.get("reason", "")),
        )
        for one in reversed(view["decisions"])
    ]
    return f"<h2>Decisions</h2>\n{table(('time', 'decision', 'version', 'reason'), rows)}"


def table(heads: tuple[str, ...], rows: Sequence[tuple[str, ...]]) -> str:
    if not rows:
        return "<p><small>none</small></p>\n"
    head = "".join(f"<th>{escape(cell)}</th>" for cell in heads)
    body = "".join(
        "<tr>" + "".join(f"<td>{escape(cell)}</td>" for cell in row) + "</tr>\n" for row in rows
    )
    return f"<table><thead><tr>{head}</tr></thead><tbody>\n{body}</tbody></table>\n"
