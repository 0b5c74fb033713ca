"""The screen of `draftsmith top`: lines of text from one answer of `/dashboard/data`. Pure
functions, no terminal."""

from __future__ import annotations

import math
import time
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

Data = dict[str, Any]

BOLD, FAINT, RED, GREEN, PLAIN = "\x1b[1m", "\x1b[2m", "\x1b[31m", "\x1b[32m", "\x1b[0m"
# eighths of a character, from low to full
BLOCKS = "".join(chr(code) for code in range(0x2581, 0x2589))
ASCII_BLOCKS = "_.-=+*#@"
VERSIONS_SHOWN, DECISIONS_SHOWN, STREAMS_SHOWN = 4, 8, 4
# of the learner's monitor, as its status names them
EVENTS = ("accepted", "drafted", "replaced", "residual", "emitted")
LABEL_WIDTH = 12
SILENT_S = 180  # one update of the learner may take a minute on a busy machine


class Line(NamedTuple):
    text: str
    style: str = ""  # of the whole line


def render(lines: Sequence[Line], *, width: int, height: int) -> str:
    """Text of one screen. Lines are cut to fit: one that wrapped would shift all below it."""
    shown = [
        f"{line.style}{printable(line.text)[:width]}{PLAIN if line.style else ''}\x1b[K"
        for line in lines[:height]
    ]
    return "\x1b[H" + "\r\n".join(shown) + "\x1b[J"


def printable(text: str) -> str:
    """Replace control characters: names and reasons come from clients and files."""
    return "".join(character if character.isprintable() else "?" for character in text)


def screen(data: Data, points: Sequence[Data], *, width: int, blocks: str = BLOCKS) -> list[Line]:
    return [
        *_head(data),
        *_rates(data, points, width, blocks),
        *_classes(data),
        *_drafts(data),
        *_versions(data),
        *_learner(data),
        *_losslessness(data),
        *_decisions(data),
        Line("q quits", FAINT),
    ]


def one_line(data: Data) -> str:
    """Line of one refresh, for a pipe or a log."""
    server, now = data["server"], data["now"]
    clock = time.strftime("%H:%M:%S", time.localtime(server["time_s"]))
    text = (
        f"{clock} {server['model']} version {server['draft_version'] or '-'}: "
        f"{number(now['tokens_per_s'], 1)} tok/s, "
        f"{speedup(now)}, tau {number(now['tau'], 2)}, alpha {alphas(now)}, "
        f"{server['running']} running, {server['waiting']} waiting, "
        f"{len(data['alarms']) + int((data['learner'] or {}).get('lossless_alarms', 0))} alarms"
    )
    return printable(text)


def _head(data: Data) -> Iterator[Line]:
    server = data["server"]
    drafter = (
        f"{server['drafter']} version {server['draft_version']}"
        if server["drafter"]
        else "no drafter"
    )
    yield Line(
        f"draftsmith {server['version']}  {server['model']}  {drafter}  up "
        f"{lasted(server['time_s'] - server['started_s'])}",
        BOLD,
    )
    if not server["lossless"]:
        yield Line("LOSSY: answers need not have the target's distribution", RED)
    yield _row(
        "requests",
        f"{server['running']} running, {server['waiting']} waiting, cache "
        f"{100 * server['kv_usage']:.0f} % full",
    )
    yield from _seeded(server)


def _seeded(server: Data) -> Iterator[Line]:
    if server["seeded_share"]:
        yield _row(
            "seeded",
            f"{100 * server['seeded_share']:.1f} % of the tokens ({server['seeded_requests']} "
            "requests) are sampled with a "
            "seed, neither learned from nor measured: leave the seed out",
        )


def _rates(data: Data, points: Sequence[Data], width: int, blocks: str) -> Iterator[Line]:
    now = data["now"]
    yield _row(
        "tok/s",
        f"{number(now['tokens_per_s'], 1)}, {number(now['busy_tokens_per_s'], 1)} while there is "
        f"work; {speedup(now)}",
    )
    taus = [_ratio(one["drafting"]["committed"], one["drafting"]["rounds"]) for one in points]
    yield _row(
        "tau",
        f"{number(now['tau'], 2)}  {sparkline(taus, max(0, width - LABEL_WIDTH - 8), blocks)}",
    )
    yield _row("alpha", alphas(now))
    yield Line("")


def _classes(data: Data) -> Iterator[Line]:
    if data["classes"]:
        yield Line(
            f"{'class':24} {'rounds':>8} {'tau':>6}  alpha by position, last 15 minutes", FAINT
        )
        for name, rates in data["classes"].items():
            yield Line(
                f"{(name or '(no class)')[:24]:24} {rates['rounds']:8} "
                f"{number(rates['tau'], 2):>6}  {alphas(rates)}"
            )
        yield Line("")


def _drafts(data: Data) -> Iterator[Line]:
    if len(data["drafts"]) > 1:
        yield Line(
            f"{'draft':24} {'version':>12} {'requests':>8} {'share':>6} {'tau':>6}  alpha by "
            "position",
            FAINT,
        )
        for one in data["drafts"]:
            version, share = (
                one["version"] or "-",
                "-" if one["share"] is None else f"{100 * one['share']:.0f} %",
            )
            yield Line(
                f"{one['draft'][:24]:24} {version[:12]:>12} {one['requests']:8} {share:>6} "
                f"{number(one['tau'], 2):>6}  "
                f"{alphas(one)}  {one['note']}"
            )
        yield Line("")


def _versions(data: Data) -> Iterator[Line]:
    if data["versions"]:
        yield Line(
            f"{'version':9} {'gate: alpha':>20} {'gain':>8} {'p':>9}  {'served: tau':>11}  alpha "
            "by position",
            FAINT,
        )
        for one in reversed(data["versions"][-VERSIONS_SHOWN:]):
            gate, served = one["gate"] or {}, data["served"].get(str(one["version"]))
            change = (
                f"{number(gate.get('alpha_live'), 4)} -> {number(gate.get('alpha_candidate'), 4)}"
            )
            yield Line(
                f"{str(one['version']) + (' live' if one['live'] else ''):9} {change:>20} "
                f"{number(gate.get('gain'), 4):>8} "
                f"{number(gate.get('p_value'), 5):>9}  {number(served and served['tau'], 2):>11}  "
                f"{alphas(served)}",
                BOLD if one["live"] else "",
            )
        yield Line("")


def _learner(data: Data) -> Iterator[Line]:
    learner, buffer = data["learner"], data["buffer"]
    if learner is not None:
        working = "resting" if learner.get("resting") else "running"
        state = working if learner["age_s"] < SILENT_S else f"silent for {lasted(learner['age_s'])}"
        counts = ", ".join(
            f"{learner.get(name, '-')} {name.replace('_', ' ')}"
            for name in ("updates", "texts", "fresh", "held_out")
        )
        yield _row("learner", f"{state}: {counts}, loss {number(learner.get('loss'), 3)}")
    if buffer is not None:
        size = f"{buffer['bytes'] / 2**20:.1f} MiB in {buffer['shards']} shards"
        yield _row("buffer", f"{size}, {data['server']['records']} rounds recorded by this server")
    if learner is not None or buffer is not None:
        yield Line("")


def _losslessness(data: Data) -> Iterator[Line]:
    """Streams of the learner's monitor: those with an alarm, and the latest ones."""
    streams = (data["learner"] or {}).get("losslessness") or {}
    alarmed = [name for name, one in streams.items() if one.get("alarm")]
    quiet = [name for name in streams if name not in alarmed]
    latest = quiet[-max(0, STREAMS_SHOWN - len(alarmed)) :] if len(alarmed) < STREAMS_SHOWN else []
    shown = [name for name in streams if name in (*alarmed, *latest)]
    if not shown:
        return
    yield Line(
        f"{'losslessness of records':40} {'positions':>9} {'evidence':>9}  z accepted, drafted, "
        "replaced, residual, emitted",
        FAINT,
    )
    for name in shown:
        one = streams[name]
        z = " ".join(number(one.get(f"z_{event}"), 1) for event in EVENTS)
        found = "  NOT LOSSLESS" if name in alarmed else ""
        yield Line(
            f"{name[:40]:40} {one.get('positions', 0):9} "
            f"{'1e' + number(one.get('log10_evidence'), 1):>9}  {z}{found}",
            RED if name in alarmed else "",
        )
    yield Line("")


def _decisions(data: Data) -> Iterator[Line]:
    for one in reversed(data["decisions"][-DECISIONS_SHOWN:]):
        clock = time.strftime("%H:%M:%S", time.localtime(one.get("time_s", 0.0)))
        of_class = f" of {one['class']}" if one.get("class") else ""
        version = "" if one.get("version") is None else f" version {one['version']}"
        style = RED if one in data["alarms"] else GREEN if one.get("decision") == "accept" else ""
        gain = "" if one.get("gain") is None else f" ({number(one['gain'], 4)})"
        yield Line(
            f"{clock} {one.get('decision', '')}{version}{of_class}: {one.get('reason', '')}{gain}",
            style,
        )


def _row(label: str, text: str) -> Line:
    return Line(f"{label:{LABEL_WIDTH}}{text}")


def number(value: Any, digits: int) -> str:
    return (
        f"{value:.{digits}f}" if isinstance(value, (int, float)) and math.isfinite(value) else "-"
    )


def alphas(rates: Data | None) -> str:
    if not rates or not rates["alpha"]:
        return "-"
    return " ".join(number(value, 2) for value in rates["alpha"])


def speedup(now: Data) -> str:
    if now["speedup"] is None:
        return "without drafts not measured (--k auto does)"
    return f"x{now['speedup']:.2f} against {number(now['plain_tokens_per_s'], 1)} without drafts"


def lasted(seconds: float) -> str:
    if seconds < 90:
        return f"{seconds:.0f} s"
    return f"{seconds / 60:.0f} min" if seconds < 5400 else f"{seconds / 3600:.1f} h"


def sparkline(values: Sequence[float | None], width: int, blocks: str) -> str:
    """Latest values that fit, one character per value; a blank where there is none."""
    shown = values[-width:] if width else []
    known = [value for value in shown if value is not None]
    if not known:
        return ""
    low, high = min(known), max(known)
    scale = (len(blocks) - 1) / (high - low) if high > low else 0.0
    return "".join(
        " " if value is None else blocks[round((value - low) * scale)] for value in shown
    )


def _ratio(above: float, below: float) -> float | None:
    return above / below if below else None
