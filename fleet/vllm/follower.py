"""Follower: keeps an engine on the version that the store gives it. Runs in the API server.

It compares what the workers have loaded, not what it did last: after a restart, a sleep or a weight
update by others the right version is put in again. A version that a worker refuses, or that falls
below the floor, is not tried again.
"""

from __future__ import annotations

import asyncio
import random
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

from draftsmith.fleet.engine import logger, once
from draftsmith.fleet.store.layout import EngineStatus, StoreError, StoreUnreachable
from draftsmith.fleet.store.store import VersionStore
from draftsmith.fleet.vllm.swap_client import Answers, SwapClient

LAYOUT = "vllm"
# Between two comparisons of all weights with those that should be loaded.
LOOK_S = 60.0
# Of a version whose refusal may pass: a slow disk, a rank that is busy.
TRIES = 3
LONGEST_WAIT_S = 300.0


class StoreFollower:
    """Args:

    figures: latest figures of the engine by version; empty where it records nothing
    floor_drop, floor_rounds: loss of alpha, over rounds of each version, that ends a version here
    """

    def __init__(
        self,
        client: SwapClient,
        store: VersionStore,
        engine: str,
        *,
        poll_s: float,
        figures: Callable[[], Figures] = dict,
        floor_drop: float = 0.1,
        floor_rounds: int = 2000,
    ):
        self.client, self.store, self.engine = client, store, engine
        self.pace = Pace(engine, poll_s)
        self.figures = figures
        self.floor_drop, self.floor_rounds = floor_drop, floor_rounds
        self.tries: dict[int, int] = {}
        self.refused: dict[int, str] = {}
        self.version: int | None = None
        self.history: list[int] = []  # versions that were served here, the latest last
        self.since_s = self.looked_s = time.time()
        self.last_swap: dict[str, Any] = {}
        self.tokens_per_s: float | None = None
        self.problem = ""

    async def run(self) -> None:
        """Until the server ends. Nothing raised here ends it."""
        while True:
            failed = False
            try:
                await self.once()
            except Exception as error:
                failed = True
                self.problem = str(error)
                once(f"versions are not followed: {error}")
                if not isinstance(error, StoreError):
                    logger.exception("draftsmith: a look for versions failed")
            await asyncio.sleep(self.pace.next_poll_s(failed=failed))

    async def once(self) -> None:
        """One look: give up what fell below the floor, serve the store's, leave a status."""
        if not await self._see():
            return
        wanted = await asyncio.to_thread(self.store.current)
        self._judge()
        goal = self.latest_good() if wanted in self.refused else wanted
        if goal is not None and goal != self.version:
            await self.serve(goal)
        self.problem = ""
        await asyncio.to_thread(self.store.put_engine, self.status())

    async def serve(self, version: int) -> None:
        """Fetch a version and swap it in; refused, its reason is kept."""
        held = [one for one in (self.version, self.latest_good()) if one is not None]
        try:
            folder = await asyncio.to_thread(self.store.fetch, version, LAYOUT, held=held)
        except StoreUnreachable:
            raise
        except StoreError as error:
            self._refuse(version, str(error))
            return
        outcome = await self.client.swap(folder, str(version))
        self.last_swap = {"version": version, "pause_ms": outcome.pause_ms, "ok": outcome.ok}
        if not outcome.ok:
            self.tries[version] = self.tries.get(version, 0) + 1
            if outcome.is_lasting or self.tries[version] == TRIES:
                self._refuse(version, outcome.reason)
            else:
                logger.info("draftsmith: version %s is tried again: %s", version, outcome.reason)
            return
        logger.info("draftsmith: serves version %s, paused %.2f ms", version, outcome.pause_ms)
        self._serves(version)

    async def _see(self) -> bool:
        """Version that the workers have loaded; False while the engine sleeps. Now and then all of
        it is compared."""
        if time.time() - self.looked_s > LOOK_S:
            self.looked_s = time.time()
            answers = await self.client.look()
        else:
            answers = await self.client.call("status")
        self._serves(version_of(answers))
        return not any(answer.get("asleep") for answer in answers)

    def _serves(self, version: int | None) -> None:
        if version == self.version:
            return
        self.version, self.since_s = version, time.time()
        if version is not None:
            self.history = [one for one in self.history if one != version] + [version]

    def latest_good(self, *, before: int | None = None) -> int | None:
        """The version that was served last and is not refused; None without one.

        Args:
            before: a version that is left out
        """
        good = [one for one in self.history if one not in self.refused and one != before]
        return good[-1] if good else None

    def _judge(self) -> None:
        """Refuse the served version where its own acceptance or losslessness fell."""
        if self.version is None or self.version in self.refused:
            return
        previous = self.latest_good(before=self.version)
        if previous is None:
            return
        figures = self.figures()
        served, before = figures.get(str(self.version), {}), figures.get(str(previous), {})
        if reason := below_floor(served, before, drop=self.floor_drop, rounds=self.floor_rounds):
            self._refuse(self.version, f"{reason}; back on version {previous}")

    def _refuse(self, version: int, reason: str) -> None:
        self.refused[version] = reason
        logger.warning("draftsmith: version %s is refused: %s", version, reason)

    def status(self) -> EngineStatus:
        figures = self.figures().get(str(self.version), {})
        return EngineStatus(
            engine=self.engine,
            version=self.version,
            since_s=self.since_s,
            alpha=figures.get("alpha"),
            tau=figures.get("tau"),
            tokens_per_s=self.tokens_per_s,
            z=figures.get("z"),
            alarm=bool(figures.get("alarm")),
            refused=dict(self.refused),
            last_swap=self.last_swap,
            at_s=time.time(),
        )


def version_of(answers: Answers) -> int | None:
    """The version that all workers serve; None where they differ or one has none."""
    versions = {str(answer.get("version") or "") for answer in answers}
    only = versions.pop() if len(versions) == 1 else ""
    return int(only) if only.isdecimal() else None


class Pace:
    """Waits of one engine, in seconds: polls with jitter, longer ones after failures."""

    def __init__(self, engine: str, poll_s: float):
        self.poll_s, self.failures = poll_s, 0
        self._random = random.Random(engine)

    def next_poll_s(self, *, failed: bool = False) -> float:
        """Wait before the next poll, 0.5 to 1.5 times `poll_s`; doubled at each failure in a
        row, up to `LONGEST_WAIT_S`."""
        self.failures = self.failures + 1 if failed else 0
        longest_s = max(self.poll_s, LONGEST_WAIT_S)
        wait_s = min(longest_s, self.poll_s * 2.0 ** min(self.failures, 30))
        return wait_s * self._random.uniform(0.5, 1.5)


# Figures by version, as the writer of records leaves them.
Figures = Mapping[str, Mapping[str, Any]]
COUNTS = ("rounds", "positions", "accepted", "committed", "judged")


def figures_of(workers: Sequence[Mapping[str, Any]]) -> Figures:
    """Figures by version over all writers: counts are added; z, evidence and alarm are those of the
    writer with the most evidence against losslessness."""
    writers = [records["writer"] for records in recorders(workers) if records.get("writer")]
    found: dict[str, list[Mapping[str, Any]]] = {}
    for writer in writers:
        for version, one in writer.get("versions", {}).items():
            found.setdefault(version, []).append(one)
    return {
        version: dict(parts[0]) if len(parts) == 1 else added(parts)
        for version, parts in found.items()
    }


def added(parts: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    counts = {name: sum(one.get(name, 0) for one in parts) for name in COUNTS}
    worst = max(parts, key=lambda one: one.get("log10_evidence", 0.0))
    return {
        **worst,
        **counts,
        "alpha": counts["accepted"] / max(1, counts["positions"]),
        "tau": counts["committed"] / max(1, counts["rounds"]),
        "alarm": max(one.get("alarm", 0.0) for one in parts),
    }


def tokens_of(workers: Sequence[Mapping[str, Any]]) -> int:
    """Tokens that an engine has sampled: ranks of a replica sample the same ones."""
    by_replica: dict[int, int] = {}
    for worker in workers:
        tokens, replica = (worker.get("records") or {}).get("tokens", 0), worker.get("replica", 0)
        by_replica[replica] = max(tokens, by_replica.get(replica, 0))
    return sum(by_replica.values())


def recorders(workers: Iterable[Mapping[str, Any]]) -> list[Mapping[str, Any]]:
    return [worker.get("records") or {} for worker in workers]


def below_floor(
    served: Mapping[str, Any], before: Mapping[str, Any], *, drop: float, rounds: int
) -> str:
    """Reason to leave a version for the one `before` it, by the figures of both, empty where there
    are none; "" to stay.

    The floor is for disasters, `drop` in alpha over so many rounds of each version; small losses
    are found by the learner's gate."""
    if served.get("alarm"):
        return "acceptance contradicts the logged probabilities: the losslessness monitor alarms"
    if min(served.get("rounds", 0), before.get("rounds", 0)) < rounds:
        return ""
    if served["alpha"] < before["alpha"] - drop:
        return (
            f"alpha {served['alpha']:.3f} in {served['rounds']} rounds, {before['alpha']:.3f} with "
            "the version before"
        )
    return ""
