"""Writer process beside an engine: `python -m draftsmith.fleet.wire.writer DESCRIPTOR JOB`.

Reads messages from the ring, writes records through the buffer's own writer, and leaves its status
in the ring. It ends when its standard input does, as it does with the engine, after it has read
and flushed everything. It runs at a lower priority than the engine, on any core.
"""

from __future__ import annotations

import json
import logging
import os
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from draftsmith.distill.buffer.buffer import BufferWriter
from draftsmith.distill.buffer.process_writer import begin, end, read_until
from draftsmith.distill.monitor.monitor import Key, Monitor, name_of
from draftsmith.fleet.engine import logger
from draftsmith.fleet.wire.messages import MessageKind, RequestMeta, WireMessage, parse
from draftsmith.fleet.wire.requests import EngineJob, LoggedPositions, Requests, rounds_of
from draftsmith.kernels.sampling import logged_compiled
from draftsmith.record import RoundRecord
from draftsmith.shared_memory.child import end_of_engine
from draftsmith.shared_memory.ring import Ring

STATUS_S = 1.0
# Steps whose drafted tokens wait for sampled ones.
STEPS = 64
# For a buffer that cannot be opened or written when the engine has ended.
PATIENCE_S = 300.0
# Chance that an engine which samples rightly ever raises an alarm.
FALSE_ALARM = 1e-3
# Records that are judged at once: numbers of arrays, not of calls, should cost.
BATCH = 256
# Versions whose figures are kept: the latest.
VERSIONS = 16


@dataclass
class VersionCounts:
    """Counts of rounds with drafted tokens. `reached` positions are those that verification came
    to: the accepted ones and the first rejected one of each round."""

    rounds: int = 0
    reached: int = 0
    accepted: int = 0

    def add(self, record: RoundRecord) -> None:
        self.rounds += 1
        self.accepted += record.accepted
        self.reached += min(record.accepted + 1, len(record.drafted))


@dataclass
class ServedFigures:
    engine: str
    monitor: Monitor = field(default_factory=lambda: Monitor(FALSE_ALARM))
    versions: dict[str, VersionCounts] = field(default_factory=dict)
    waiting: list[RoundRecord] = field(default_factory=list)

    def add(self, records: Sequence[RoundRecord]) -> list[str]:
        """Count records; returns the alarms that they raise, one sentence each."""
        for one in records:
            if one.drafted:
                self.versions.setdefault(one.draft_version, VersionCounts()).add(one)
            if one.drafted and not one.seeded:
                self.waiting.append(one)
        while len(self.versions) > VERSIONS:
            del self.versions[next(iter(self.versions))]
        return self.judge() if len(self.waiting) >= BATCH else []

    def judge(self) -> list[str]:
        """Judge the records that wait for it."""
        waiting, self.waiting = self.waiting, []
        return self.monitor.look(waiting) if waiting else []

    def figures(self) -> dict[str, dict[str, float]]:
        """Figures by version: rounds, reached positions, alpha, tau; z of `accepted`, log10 of the
        evidence against losslessness, and 1 under `alarm` where it was enough."""
        judged = self.monitor.numbers()
        return {
            version: {
                "rounds": counts.rounds,
                "positions": counts.reached,
                "accepted": counts.accepted,
                "alpha": counts.accepted / max(1, counts.reached),
                "tau": 1 + counts.accepted / max(1, counts.rounds),
                **_losslessness(judged.get(name_of(Key(self.engine, version)), {})),
            }
            for version, counts in self.versions.items()
        }


def _losslessness(numbers: dict[str, Any]) -> dict[str, float]:
    return {
        "judged": numbers.get("positions", 0),
        "z": numbers.get("z_accepted", 0.0),
        "log10_evidence": numbers.get("log10_evidence", 0.0),
        "alarm": numbers.get("alarm", 0.0),
    }


class EngineWriter:
    def __init__(self, ring: Ring, job: EngineJob):
        logged_compiled.prepare()  # no step waits for it later
        self.ring = ring
        self.requests = Requests(job)
        self.served = ServedFigures(job.engine)
        self.buffer = BufferWriter(job.buffer, share=job.share)
        self.steps: dict[int, dict[int, LoggedPositions]] = {}
        self.failed, self.left_s = 0, 0.0
        self._read: Mapping[MessageKind, Callable[[WireMessage], None]] = {
            MessageKind.BEGIN: self._begin,
            MessageKind.POSITIONS: self._positions,
            MessageKind.TOKENS: self._tokens,
            MessageKind.END: self._end,
            MessageKind.RESUME: self._resume,
        }

    def take(self) -> int:
        room = self.ring.next()
        if room is None:
            return 0
        message = parse(room)
        try:
            self._read[message.kind](message)
        except Exception:
            self.failed += 1
            if self.failed <= 3:
                logger.exception("a message of the engine was not understood")
        self.ring.release()
        return 1

    def _begin(self, message: WireMessage) -> None:
        meta = message.meta(RequestMeta)
        self.requests.begin(message.number, meta, message.arrays[1].tolist())

    def _positions(self, message: WireMessage) -> None:
        self.steps[message.number] = rounds_of(message, self.requests.temperatures())
        while len(self.steps) > STEPS:
            del self.steps[next(iter(self.steps))]

    def _tokens(self, message: WireMessage) -> None:
        handles, counts, tokens = (array.tolist() for array in message.arrays)
        rounds = self.steps.pop(message.number, {})
        begin = 0
        for handle, count in zip(handles, counts):
            end = begin + count
            self._put(self.requests.sampled(handle, tokens[begin:end], rounds.get(handle)))
            begin = end

    def _end(self, message: WireMessage) -> None:
        for handle in message.arrays[0].tolist():
            self._put(self.requests.end(handle))

    def _resume(self, message: WireMessage) -> None:
        self._put(self.requests.resumed(message.number, message.arrays[0].tolist()))

    def _put(self, records: list[RoundRecord]) -> None:
        for record in records:
            self.buffer.put(record)
        for alarm in self.served.add(records):
            logger.error("draftsmith: %s", alarm)

    def leave(self) -> None:
        if time.monotonic() - self.left_s > STATUS_S:
            self._leave()

    def _leave(self) -> None:
        for alarm in self.served.judge():
            logger.error("draftsmith: %s", alarm)
        status = {
            "at_s": time.time(),
            "written": self.buffer.written,
            "dropped": self.buffer.dropped,
            "running": len(self.requests.running),
            "mismatched": self.requests.mismatched,
            "failed": self.failed,
            "versions": self.served.figures(),
        }
        self.ring.share = self.buffer.share
        self.ring.leave_status(json.dumps(status).encode())
        self.left_s = time.monotonic()

    def close(self) -> None:
        """Write the text that unfinished requests have so far, and flush. The engine has ended, and
        its last records are only here: a buffer that is away is waited for."""
        for handle in list(self.requests.running):
            self._put(self.requests.end(handle))
        self.buffer.close(patience_s=PATIENCE_S)
        self._leave()


def run(ring: Ring, job: EngineJob, ended: Callable[[float], bool]) -> None:
    read_until(ended, partial(EngineWriter, ring, job), patience_s=PATIENCE_S)


def main(descriptor: str, job: str) -> None:
    logging.basicConfig(format="%(levelname)s %(message)s")
    begin()
    if hasattr(os, "sched_setaffinity"):
        # The engine binds its threads to cores and its children with them.
        os.sched_setaffinity(0, range(os.cpu_count() or 1))
    end(lambda: run(Ring(int(descriptor)), EngineJob(**json.loads(job)), end_of_engine()))


if __name__ == "__main__":
    main(*sys.argv[1:])
