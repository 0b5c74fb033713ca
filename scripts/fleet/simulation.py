"""Simulation of a fleet: polls, downloads, deaths and the rollout's decisions as events in
simulated time."""

from __future__ import annotations

import contextlib
import heapq
import itertools
from collections.abc import Callable, Iterable, Sequence
from typing import Any, cast

from draftsmith.distill.buffer.traffic import ServedText
from draftsmith.fleet.config import RolloutConfig
from draftsmith.fleet.rollout.controller import Controller
from draftsmith.fleet.store.errors import StoreUnreachable
from draftsmith.fleet.store.store import VersionStore
from scripts.fleet.model import (
    CURRENT_BYTES,
    MANIFEST_BYTES,
    ROLLOUT_BYTES,
    STATUS_BYTES,
    Engine,
    ModelStore,
    Shape,
    engines_of,
    figures,
)

STEP_S = 10.0  # between two steps of the controller
TEXTS = 20  # requests read per engine and period


class Simulation:
    """All engines serve version 1 at the start.

    Args:
        stages: shares that try a version first; () makes it live for all at once.
    """

    def __init__(self, shape: Shape, stages: Sequence[float], config: RolloutConfig):
        self.shape, self.store, self.engines = shape, ModelStore(shape), engines_of(shape)
        self.by_name = {engine.name: engine for engine in self.engines}
        self.config, self.gains = config, dict(shape.gains)
        self.counter, self.events = itertools.count(), cast(list[Any], [])
        self.read_s = 0.0
        self.all_s: dict[int, float] = {}  # when the last living engine came to a version
        self.on_bad_s = 0.0
        self.store.live = 1
        for engine in self.engines:
            engine.serve(1, 0.0)
            engine.cache = [1]
            self.store.statuses[engine.name] = engine.status(0.0)
            first_s = engine.pace.next_poll_s() if shape.has_jitter else shape.poll_s
            self.after(first_s, self.poll, engine)
            self.plan_death(engine)
        self.controller = self.controller_of(stages) if stages else None
        if self.controller:
            self.after(STEP_S, self.step)

    def controller_of(self, stages: Sequence[float]) -> Controller:
        return Controller(
            cast(VersionStore, self.store),
            stages,
            self.config,
            texts=self.texts,
            clock=self.store.clock,
        )

    def after(self, wait_s: float, do: Callable[..., None], *arguments: Any) -> None:
        heapq.heappush(self.events, (self.store.now_s + wait_s, next(self.counter), do, arguments))

    def run(self, until_s: float) -> None:
        while self.events and self.events[0][0] <= until_s:
            self.store.now_s, _, do, arguments = heapq.heappop(self.events)
            do(*arguments)
        self.store.now_s = until_s

    def publish(self, version: int) -> None:
        """Once the store answers."""
        try:
            if self.controller is None:
                self.store.put_current(version)
            elif not self.controller.offer(version):
                self.after(STEP_S, self.publish, version)
        except StoreUnreachable:
            self.after(STEP_S, self.publish, version)

    def step(self) -> None:
        assert self.controller is not None
        with contextlib.suppress(StoreUnreachable):
            self.controller.step()
        self.after(STEP_S, self.step)

    def poll(self, engine: Engine) -> None:
        if engine.is_dead:
            return
        now_s, is_down = self.store.now_s, self.store.is_down
        self.store.load.add(now_s, 1 if is_down else 3, 0 if is_down else self.poll_bytes)
        if not is_down:
            self.follow(engine, self.store.wanted(engine.name))
            self.store.statuses[engine.name] = engine.status(now_s)
        wait_s = engine.pace.next_poll_s(failed=is_down)
        self.after(wait_s if self.shape.has_jitter else self.shape.poll_s, self.poll, engine)

    @property
    def poll_bytes(self) -> int:
        has_plan = self.store.plan is not None
        return CURRENT_BYTES + STATUS_BYTES + (ROLLOUT_BYTES if has_plan else 0)

    def follow(self, engine: Engine, wanted: int | None) -> None:
        if wanted is None or wanted == engine.version or wanted in engine.refused:
            return
        if wanted in engine.cache:
            self.serve(engine, wanted)
        elif engine.loading is None:
            engine.loading = wanted
            self.after(engine.pace.download_delay_s(wanted), self.download, engine, wanted)

    def download(self, engine: Engine, version: int) -> None:
        if engine.is_dead or self.store.is_down:
            engine.loading = None
            return
        took_s = self.shape.draft_bytes / self.shape.engine_bytes_per_s
        size = self.shape.draft_bytes + MANIFEST_BYTES
        self.store.load.add(self.store.now_s, 1 + self.shape.files, size, took_s)
        self.after(took_s, self.downloaded, engine, version)

    def downloaded(self, engine: Engine, version: int) -> None:
        engine.loading = None
        if engine.is_dead:
            return
        if version in self.shape.torn:
            engine.refused[version] = "a file has 10 bytes instead of 20"
            return
        engine.cache = [*[one for one in engine.cache if one != version][-1:], version]
        if self.store.wanted(engine.name) == version:
            self.serve(engine, version)

    def serve(self, engine: Engine, version: int) -> None:
        engine.serve(version, self.store.now_s)
        if all(one.is_dead or one.version == version for one in self.engines):
            self.all_s.setdefault(version, self.store.now_s)

    def plan_death(self, engine: Engine) -> None:
        if self.shape.deaths_per_hour > 0:
            wait_s = engine.draw.expovariate(self.shape.deaths_per_hour / 3600)
            self.after(wait_s, self.die, engine)

    def die(self, engine: Engine) -> None:
        engine.is_dead, engine.loading, engine.cache = True, None, []
        engine.serve(None, self.store.now_s)
        self.after(self.shape.restart_s, self.restart, engine)

    def restart(self, engine: Engine) -> None:
        """Begins with the draft of its command line, which is no version."""
        engine.is_dead = False
        self.poll(engine)
        self.plan_death(engine)

    def texts(self, since_s: float) -> Iterable[ServedText]:
        """Requests of the periods that ended since the last call."""
        plan = self.store.plan
        assert plan is not None
        begun_s, self.read_s = max(since_s, self.read_s), self.store.now_s
        first, last = (
            int((at_s - plan.begun_s) // plan.switch_s) for at_s in (begun_s, self.read_s)
        )
        for number in range(first, last):
            at_s = plan.begun_s + (number + 0.5) * plan.switch_s
            for engine in filter(lambda one: plan.has(one.name), self.engines):
                version = engine.version_at(at_s)
                if version is None:
                    continue
                level = self.shape.alpha + engine.draw.gauss(0, self.shape.noise)
                alpha = min(1.0, max(0.0, level + self.gains.get(version, 0.0)))
                for one in range(TEXTS):
                    yield engine.text(version, at_s, alpha, one)

    def share_on(self, version: int) -> float:
        """Share of the living engines that serve a version."""
        living = [engine for engine in self.engines if not engine.is_dead]
        return sum(engine.version == version for engine in living) / len(living)

    def served_s(self, version: int) -> float:
        """Seconds that engines served a version, summed over engines."""
        total = 0.0
        for engine in self.engines:
            ends = [*(at_s for at_s, _ in engine.swaps[1:]), self.store.now_s]
            total += sum(
                end_s - at_s
                for (at_s, served), end_s in zip(engine.swaps, ends, strict=True)
                if served == version
            )
        return total

    def report(self, version: int) -> dict[str, Any]:
        plan = self.store.plan
        return {
            "share_on_it": self.share_on(version),
            "all_on_it_s": self.all_s.get(version),
            "engine_hours_on_it": self.served_s(version) / 3600,
            "requests_per_s": figures(self.store.load.requests),
            "bytes_per_s": figures(self.store.load.bytes),
            "refused_by": sum(version in engine.refused for engine in self.engines),
            "decisions": [
                {name: one[name] for name in ("decision", "stage", "reason")}
                for one in (plan.decisions if plan else ())
            ],
        }
