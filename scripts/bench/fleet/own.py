"""The same requests to draftsmith's own engine with the same learner, for a table beside that of a
fleet."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

from scripts.bench.fleet.answers import acceptance, recorded, send
from scripts.bench.fleet.door import free_port
from scripts.demo.traffic import NAME, Shift, daemon, server


def measured(shift: Shift, prompts: list[list[int]], command: list[str]) -> dict[str, Any]:
    """Acceptance as `answers.acceptance` gives it, and the number of requests that failed."""
    folder = shift.folder / "own"
    folder.mkdir()
    own = dataclasses.replace(shift, folder=folder, port=free_port())
    with server(own, command), daemon(own, command):
        url = f"http://127.0.0.1:{own.port}"
        answers = send(own, [url], prompts, lambda name: {"model": NAME, "request_class": name})
        done = [answer for answer in answers if answer is not None]
        records = recorded(str(folder / "buffer"), len(done))
    return {"failed": len(prompts) - len(done), **acceptance(done, records)}


def table(fleet: Mapping[str, Any], own: Mapping[str, Any]) -> list[str]:
    """Lines of a table: alpha and tau on code, with the first draft on prose, in each part of the
    prose and in its last quarter."""
    first = "prose, first draft"
    left, right = (next(iter(one["prose"].values()), None) for one in (fleet, own))
    rows: list[tuple[str, Any, Any]] = [
        ("code", fleet["code"], own["code"]),
        (first, left, right),
    ]
    for place, pair in enumerate(zip(fleet["parts"], own["parts"]), start=1):
        rows.append((f"prose, part {place} of {len(fleet['parts'])}", *pair))
    rows.append(("prose, last quarter", fleet["last_quarter"], own["last_quarter"]))
    lines = ["| traffic | fleet: alpha, tau | own engine: alpha, tau |", "|---|---|---|"]
    return lines + [f"| {name} | {cell(left)} | {cell(right)} |" for name, left, right in rows]


def cell(one: Mapping[str, float] | None) -> str:
    return f"{one['alpha']:.3f}, {one['tau']:.3f}" if one else "-"
