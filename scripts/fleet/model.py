"""Store and engines of a simulated fleet, in simulated time. Assignment, jitter, statuses and the
rollout's decisions are the code that runs in a fleet; the store's bytes and the engines' traffic
are numbers."""

from __future__ import annotations

import bisect
import random
from collections import Counter
from dataclasses import dataclass, field
from typing import Any

from draftsmith.distill.buffer.traffic import ServedText, stitch
from draftsmith.fleet.store.engine_status import EngineStatus
from draftsmith.fleet.store.errors import StoreUnreachable
from draftsmith.fleet.store.pace import Pace
from draftsmith.fleet.store.rollout import Rollout
from draftsmith.record import RoundRecord

STATUS_BYTES, CURRENT_BYTES, ROLLOUT_BYTES, MANIFEST_BYTES = 500, 2, 4000, 2000
K = 4  # drafted tokens per round


@dataclass(frozen=True)
class Shape:
    """Inputs of a simulation, times in seconds."""

    engines: int = 1000
    poll_s: float = 10.0
    has_jitter: bool = True
    spread_s: float = 120.0  # over which downloads of a version begin
    draft_bytes: float = 1e9
    files: int = 4
    engine_bytes_per_s: float = 1.25e9  # a 10 Gbit/s card
    deaths_per_hour: float = 0.0  # per engine; restarts take `restart_s` and lose the cache
    restart_s: float = 120.0
    down: tuple[tuple[float, float], ...] = ()  # the store is away, from and to
    alpha: float = 0.5
    noise: float = 0.05  # of an engine's acceptance between periods, for the hour and the router
    gains: tuple[tuple[int, float], ...] = ()  # of alpha, by version
    torn: tuple[int, ...] = ()  # versions with a file that is cut


class Load:
    """Requests and bytes of the store in each second."""

    def __init__(self) -> None:
        self.requests: Counter[int] = Counter()
        self.bytes: Counter[int] = Counter()

    def add(self, at_s: float, requests: int, size: float = 0.0, over_s: float = 0.0) -> None:
        self.requests[int(at_s)] += requests
        seconds = max(1, round(over_s))
        for second in range(seconds):
            self.bytes[int(at_s) + second] += int(size / seconds)


class ModelStore:
    """`VersionStore` as the rollout uses it."""

    def __init__(self, shape: Shape):
        self.shape, self.now_s, self.load = shape, 0.0, Load()
        self.live: int | None = None
        self.plan: Rollout | None = None
        self.statuses: dict[str, EngineStatus] = {}

    def clock(self) -> float:
        return self.now_s

    @property
    def is_down(self) -> bool:
        return any(begin <= self.now_s < end for begin, end in self.shape.down)

    def reached(self) -> None:
        if self.is_down:
            raise StoreUnreachable("the store is away")

    def current_or_none(self) -> int | None:
        self.reached()
        return self.live

    def rollout_or_none(self) -> Rollout | None:
        self.reached()
        return self.plan

    def put_current(self, version: int) -> None:
        self.reached()
        self.live = version

    def put_rollout(self, rollout: Rollout) -> None:
        self.reached()
        self.plan = rollout

    def engines(self) -> list[EngineStatus]:
        self.reached()
        return list(self.statuses.values())

    def wanted(self, engine: str) -> int | None:
        if self.plan is None or self.plan.live != self.live:
            return self.live
        return self.plan.version_for(engine, self.now_s)


@dataclass
class Engine:
    name: str
    pace: Pace
    draw: random.Random
    version: int | None = None
    is_dead: bool = False
    cache: list[int] = field(default_factory=list)  # the latest last
    loading: int | None = None
    refused: dict[int, str] = field(default_factory=dict)
    swaps: list[tuple[float, int | None]] = field(default_factory=list)

    def serve(self, version: int | None, at_s: float) -> None:
        self.version = version
        self.swaps.append((at_s, version))

    def version_at(self, at_s: float) -> int | None:
        place = bisect.bisect_right(self.swaps, at_s, key=lambda swap: swap[0])
        return self.swaps[place - 1][1] if place else None

    def status(self, at_s: float) -> EngineStatus:
        return EngineStatus(engine=self.name, version=self.version, refused=self.refused, at_s=at_s)

    def text(self, version: int, at_s: float, alpha: float, number: int) -> ServedText:
        """A request of one round."""
        accepted = 0
        while accepted < K and self.draw.random() < alpha:
            accepted += 1
        record = RoundRecord(
            f"{self.name}/{at_s}/{number}", 0, "", "t", "r", str(version), at_s, 1.0, 0, 1.0, 0.0,
            1, [1], [7] * K, accepted, [7] * (accepted + 1), 7, engine=self.name,
        )  # fmt: skip
        text = stitch([record])
        assert text is not None
        return text


def engines_of(shape: Shape) -> list[Engine]:
    spread_s = shape.spread_s if shape.has_jitter else 0.0
    return [
        Engine(
            f"engine-{number}",
            Pace(f"engine-{number}", shape.poll_s, spread_s=spread_s),
            random.Random(number),
        )
        for number in range(shape.engines)
    ]


def figures(values: Counter[int]) -> dict[str, Any]:
    """Largest and mean value of a second, and the sum."""
    seconds = max(values, default=0) - min(values, default=0) + 1
    total = sum(values.values())
    return {"peak": max(values.values(), default=0), "mean": total / seconds, "sum": total}
