"""Kinds of traffic that come back: code, prose, code and prose again, each long enough to learn.
alpha of each visit as served and by the static draft, on the same texts."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from draftsmith.distill.buffer.traffic import ServedText
from draftsmith.drafters.published import versions
from scripts.bench.markdown_table import header, line
from scripts.bench.online.cells import (
    FIRST,
    REHEARSED,
    RETURN_LEARNERS,
    RETURNING,
    RETURNS,
    SECOND,
    VISITS,
    Cell,
    part_of,
)
from scripts.bench.online.domains import asks
from scripts.bench.online.paired import Shadow, alphas
from scripts.bench.online.setting import Setting, learning
from scripts.bench.online.streams import Stream, blocks
from scripts.bench.online.world import World

Row = dict[str, Any]
EDGE = 60  # requests at the end of a visit, and at the beginning of the next one of its kind
ROLLED_BACK = "rolled back"
WINDOW = 40  # requests of a window that is compared with the static draft
JUDGED, JUDGED_AT = 64, 7 * 10**6  # texts away from the stream


def visits(requests: int) -> Stream:
    return blocks(*((domain, part_of(requests, share)) for domain, share in VISITS))


def run_returns(setting: Setting, cell: Cell) -> Row:
    requests = int(cell.arguments["requests"])
    draft = setting.draft(cell.seed)
    chosen = learning(RETURN_LEARNERS.get(cell.name, RETURNING), requests)
    learn = chosen.learn
    if cell.name == REHEARSED:
        learn = replace(learn, rehearse=(str(setting.data(cell.seed)),))
    with setting.room(f"{cell.name}-{cell.seed}") as folder:
        world = World(setting.target, draft, folder, learn, gate=chosen.gate, seed=cell.seed)
        shadow = Shadow(world)
        answers = list(world.serve(asks(setting.prompts(cell.seed), visits(requests))))
        texts = texts_of(setting, world, shadow, cell)
        _, prose, code, again = visits_of(cell.to_dict(), texts)
        compared = {one["version"] for one in (prose[-1], code[-1], settled(again), again[-1])}
        return {
            "texts": texts,
            "answers": [answer.to_dict() for answer in answers],
            "decisions": versions.read_decisions(world.root),
            "published": len(versions.versions(world.root)),
            "versions": judged(setting, world, cell, sorted({1, *compared})),
        }


def texts_of(setting: Setting, world: World, shadow: Shadow, cell: Cell) -> list[Row]:
    """Sums of alpha, text by text in the order in which they ended."""
    texts = shadow.texts
    fixed = alphas(setting, setting.load(setting.draft(cell.seed)), texts)
    served = [np.zeros_like(one.alpha) for one in fixed]
    for version in versions.versions(world.root):
        mine = [index for index, text in enumerate(texts) if is_of(text, version)]
        drafter = setting.load(versions.folder_of(world.root, version))
        scored = alphas(setting, drafter, [texts[index] for index in mine])
        for index, one in zip(mine, scored, strict=True):
            drafted = [name == str(version) for name in one.version]
            served[index][drafted] = one.alpha[drafted]
    return [
        {
            "domain": text.records[0].request_class,
            "version": live,
            "positions": len(one.alpha),
            "static": float(one.alpha.sum()),
            "served": float(mine.sum()),
        }
        for text, live, one, mine in zip(texts, shadow.live, fixed, served, strict=True)
    ]


def is_of(text: ServedText, version: int) -> bool:
    return any(record.draft_version == str(version) for record in text.records)


def judged(
    setting: Setting, world: World, cell: Cell, chosen: Sequence[int]
) -> dict[str, dict[str, float]]:
    """alpha of versions by domain, on other texts, which the static draft serves."""
    static = setting.load(setting.draft(cell.seed))
    found: dict[str, dict[str, float]] = {}
    for domain in (FIRST, SECOND):
        texts = setting.texts(static, domain, JUDGED, seed=cell.seed, begin=JUDGED_AT)
        for version in chosen:
            drafter = setting.load(versions.folder_of(world.root, version))
            found.setdefault(str(version), {})[domain] = setting.alpha(drafter, texts)
    return found


# The table.


def visits_of(cell: Row, texts: Sequence[Row]) -> list[list[Row]]:
    """Texts of each visit. Texts that end beside those of the next visit are sorted by domain."""
    left = {domain: [one for one in texts if one["domain"] == domain] for domain in (FIRST, SECOND)}
    parts = []
    for domain, share in VISITS:
        count = part_of(int(cell["arguments"]["requests"]), share)
        parts.append(left[domain][:count])
        left[domain] = left[domain][count:]
    return parts


def settled(visit: Sequence[Row]) -> Row:
    return visit[min(EDGE, len(visit) - 1)]


def alpha(texts: Sequence[Row], name: str = "served") -> float:
    return float(sum(one[name] for one in texts) / sum(one["positions"] for one in texts))


def gain(texts: Sequence[Row]) -> float:
    return alpha(texts) - alpha(texts, "static")


def lowest_window(texts: Sequence[Row]) -> float:
    """Least gain over the static draft in a window of requests."""
    size = min(WINDOW, len(texts))
    return min(gain(texts[end - size : end]) for end in range(size, len(texts) + 1))


def returns_table(rows: Sequence[Row]) -> list[str]:
    lines = header(
        "learner", "seed", *(f"{domain}: static, served" for domain, _ in VISITS),
        f"gain of prose kept, first {EDGE}", f"of the version live after {EDGE}",
        "code at return / before", "/ static", f"lowest gain of {WINDOW} requests",
        "versions", "rollbacks", "CPU s of learning",
    )  # fmt: skip
    mine = [row for row in rows if row["cell"]["part"] == RETURNS]
    for row in mine:
        lines.append(line(row["cell"]["name"], row["cell"]["seed"], *figures(row)))
    return lines if mine else []


def returns_summary(result: Row) -> Row:
    """Figures without single requests."""
    texts = result["texts"]
    windows = [texts[begin : begin + WINDOW] for begin in range(0, len(texts), WINDOW)]
    return {
        "windows": [
            {
                "requests": len(some),
                "domain": some[-1]["domain"],
                "static": round(alpha(some, "static"), 4),
                "served": round(alpha(some), 4),
            }
            for some in windows
        ],
        "rolled back": [
            {name: one[name] for name in ("left", "version", "reason")}
            for one in result["decisions"]
            if one["decision"] == ROLLED_BACK
        ],
        "published": result["published"],
        "versions": result["versions"],
        "learn_s": result["answers"][-1]["learn_s"],
        "serve_s": result["answers"][-1]["serve_s"],
    }


def figures(row: Row) -> list[str]:
    found = row["result"]
    parts = visits_of(row["cell"], found["texts"])
    first, prose, code, again = parts
    kept = share(gain(again[:EDGE]), gain(prose[-EDGE:]))
    decided = [one["decision"] for one in found["decisions"]]
    return [
        *(f"{alpha(one, 'static'):.3f}, {alpha(one):.3f}" for one in parts),
        f"{kept:.2f}",
        f"{kept_of_live(found['versions'], prose[-1], settled(again)):.2f}",
        f"{alpha(code[:EDGE]) / alpha(first):.3f}",
        f"{alpha(code[:EDGE]) / alpha(code[:EDGE], 'static'):.3f}",
        f"{lowest_window(found['texts']):.3f}",
        str(found["published"]),
        str(decided.count(ROLLED_BACK)),
        f"{found['answers'][-1]['learn_s']:.0f}",
    ]


def kept_of_live(versions: Row, before: Row, after: Row) -> float:
    """Gain on other texts of prose of the version that is live at a text, of that of another's."""
    now, then, static = (
        versions[str(one)][SECOND] for one in (after["version"], before["version"], 1)
    )
    return share(now - static, then - static)


def share(now: float, then: float) -> float:
    """NaN where nothing had been gained."""
    return now / then if then else math.nan
