"""A stream of requests served by a draft that learns, and alpha of that draft and of the static one
at the same positions of the same texts, exact."""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any, cast

import numpy as np

from draftsmith.distill.buffer.traffic import ServedText
from draftsmith.distill.config import LearnConfig
from draftsmith.distill.learn.learner import Learner, Rest, UpdateReport, no_rest
from draftsmith.drafters.interface import TrainedDrafter
from scripts.bench.online.domains import Ask, asks
from scripts.bench.online.setting import GATE, LEARN, Setting
from scripts.bench.online.streams import SECOND, STREAMS, Stream
from scripts.bench.online.world import Pipe, World

PAGE_MIB = os.sysconf("SC_PAGE_SIZE") / 2**20
EVALUATED = 10**6  # numbers of the requests that drafts are compared on, away from any stream
# Of an offline run, as long as learning was: the rate falls in three stages.
OFFLINE_RATES = ((0.6, 2.0), (0.25, 0.6), (0.15, 0.2))  # share of the steps, of the online rate
COMPARED = "sudden"  # ends beside a draft distilled offline from the same texts


def run(setting: Setting, name: str, requests: int, seed: int) -> dict[str, Any]:
    stream = STREAMS[name](requests)
    static = setting.load(setting.draft(seed))
    with setting.room(f"{name}-{seed}") as folder:
        world = World(setting.target, setting.draft(seed), folder, LEARN, gate=GATE, seed=seed)
        taught = Taught(world)
        some = clocked(stream, asks(setting.prompts(seed), stream.domains), world.pipe)
        rows: list[dict[str, Any]] = []
        for tokens in world.serve(some):
            live = cast(TrainedDrafter, world.server.engine.drafter)
            for text in world.pipe.taken():
                rows.append(scored(setting, live, static, text) | {"tokens": tokens})
        counters = world.daemon.counters
        compared = None
        if name == COMPARED:
            compared = compare(setting, world, static, taught.texts, requests // 10, seed)
        return {
            "windows": windows(stream, rows),
            "tokens": sum(row["tokens"] for row in rows),
            "serve_s": world.server.serve_s, "learn_s": world.server.learn_s,
            "updates": counters.updates, "published": world.live - 1,
            "rolled_back": counters.rolled_back, "resident_mib": resident_mib(),
            "compared": compared,
        }  # fmt: skip


def clocked(stream: Stream, some: Iterator[Ask], pipe: Pipe) -> Iterator[Ask]:
    """Requests; the simulated time goes on with the windows."""
    window = 0
    for number, ask in enumerate(some):
        while number >= stream.ends[window]:
            window += 1
        if stream.window_s is not None:
            pipe.now_s = window * stream.window_s
        yield ask


def scored(
    setting: Setting, live: TrainedDrafter, static: TrainedDrafter, text: ServedText
) -> dict[str, Any]:
    """Sums over the positions of a text, by the weights that were live when it ended and by the
    static draft's."""
    ((own,), (fixed,)) = (setting.alphas(one, [text]) for one in (live, static))
    domain = text.records[0].request_class
    return {
        "domain": domain, "positions": len(own), "live": float(own.sum()), "static": float(fixed.sum())
    }  # fmt: skip


def windows(stream: Stream, rows: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """Means over the texts that ended in the place of a window's requests."""
    found = []
    for number, (begin, end) in enumerate(pairwise([0, *stream.ends])):
        some = rows[begin:end]
        positions = sum(row["positions"] for row in some)
        if positions:
            alphas = {
                name: sum(row[name] for row in some) / positions for name in ("live", "static")
            }
            found.append(
                {"requests": len(some), "positions": positions, "is_shift": number in stream.shifts}
                | alphas
            )
    return found


class Taught:
    """Texts that the learner was given: the same tokens that an offline run then gets."""

    def __init__(self, world: World):
        self.texts: list[ServedText] = []
        self._update = world.daemon.track.learner.update
        world.daemon.track.learner.update = self._given  # type: ignore[method-assign]

    def _given(self, fresh: Sequence[ServedText], rest: Rest = no_rest) -> UpdateReport:
        self.texts += fresh
        return self._update(fresh, rest)


def compare(
    setting: Setting,
    world: World,
    static: TrainedDrafter,
    taught: Sequence[ServedText],
    count: int,
    seed: int,
) -> dict[str, float]:
    """alpha of drafts on the same new texts of the second domain, which the live version serves:
    static, learned, and trained offline on the texts of that domain that the learner was given."""
    online, offline = world.daemon.track.live.draft, setting.load(setting.draft(seed))
    of_second = [text for text in taught if text.records[0].request_class == SECOND]
    distill(offline, setting, of_second, seed=seed)
    texts = setting.texts(online, SECOND, max(16, count), seed=seed, begin=EVALUATED)
    drafts = {"static": static, "online": online, "offline": offline}
    return {
        name: float(np.concatenate(setting.alphas(one, texts)).mean())
        for name, one in drafts.items()
    }


def distill(
    drafter: TrainedDrafter, setting: Setting, texts: Sequence[ServedText], *, seed: int
) -> None:
    """As the learner trains, as many steps, but with all texts at hand from the beginning, in any
    order, at a rate that falls."""
    steps = max(1, LEARN.steps * len(texts) // LEARN.fresh)
    for share, rate in OFFLINE_RATES:
        config = LearnConfig(
            lr=rate * LEARN.lr,
            steps=max(1, round(share * steps)),
            unroll=LEARN.unroll,
            max_length=LEARN.max_length,
            replay=0.0,
        )
        Learner(drafter, setting.target, config, seed=seed).update(list(texts))


def resident_mib() -> float:
    return int(Path("/proc/self/statm").read_text(encoding="ascii").split()[1]) * PAGE_MIB
