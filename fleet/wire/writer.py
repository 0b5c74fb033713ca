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
from collections.abc import Callable, Mapping
from typing import Any

import torch

from draftsmith.distill.buffer.buffer import BufferWriter
from draftsmith.errors import UserError
from draftsmith.fleet.log import logger, once
from draftsmith.fleet.wire.messages import MessageKind, RequestMeta, WireMessage, parse
from draftsmith.fleet.wire.positions import LoggedPositions, rounds_of
from draftsmith.fleet.wire.requests import EngineJob, Requests
from draftsmith.fleet.wire.served import ServedFigures
from draftsmith.kernels.sampling import logged_compiled
from draftsmith.record import RoundRecord
from draftsmith.shared_memory.child import NICE, REFUSED, end_of_engine
from draftsmith.shared_memory.ring import Ring

# Between two looks into an empty ring.
LOOK_S = 0.02
STATUS_S = 1.0
# Steps whose drafted tokens wait for sampled ones.
STEPS = 64
# For a buffer that cannot be opened or written when the engine has ended.
PATIENCE_S = 300.0
# Between two tries to open it.
RETRY_S = 1.0


class EngineWriter:
    def __init__(self, job: EngineJob):
        logged_compiled.prepare()  # no step waits for it later
        self.requests = Requests(job)
        self.served = ServedFigures(job.engine)
        self.buffer = BufferWriter(job.buffer, share=job.share)
        self.steps: dict[int, dict[int, LoggedPositions]] = {}
        self.failed = 0
        self._read: Mapping[MessageKind, Callable[[WireMessage], None]] = {
            MessageKind.BEGIN: self._begin,
            MessageKind.POSITIONS: self._positions,
            MessageKind.TOKENS: self._tokens,
            MessageKind.END: self._end,
            MessageKind.RESUME: self._resume,
        }

    def read(self, message: WireMessage) -> None:
        try:
            self._read[message.kind](message)
        except Exception:
            self.failed += 1
            if self.failed <= 3:
                logger.exception("a message of the engine was not understood")

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

    def status(self) -> dict[str, Any]:
        for alarm in self.served.judge():
            logger.error("draftsmith: %s", alarm)
        return {
            "at_s": time.time(),
            "written": self.buffer.written,
            "dropped": self.buffer.dropped,
            "running": len(self.requests.running),
            "mismatched": self.requests.mismatched,
            "failed": self.failed,
            "versions": self.served.figures(),
        }

    def close(self) -> None:
        """Write the text that unfinished requests have so far, and flush. The engine has ended, and
        its last records are only here: a buffer that is away is waited for."""
        for handle in list(self.requests.running):
            self._put(self.requests.end(handle))
        self.buffer.close(patience_s=PATIENCE_S)


def opened(job: EngineJob, ended: Callable[[float], bool]) -> EngineWriter:
    """Writer into a buffer that may be away now; what the engine sends waits in the ring. Raises
    `OSError` where it stays away for `PATIENCE_S` after the engine's end."""
    over_s = None
    while True:
        try:
            return EngineWriter(job)
        except OSError as error:
            once(f"buffer {job.buffer!r} cannot be opened ({error}); records wait")
            if over_s is not None and time.monotonic() - over_s > PATIENCE_S:
                raise
        if over_s is not None:
            time.sleep(RETRY_S)
        elif ended(RETRY_S):
            over_s = time.monotonic()


def run(ring: Ring, job: EngineJob, ended: Callable[[float], bool]) -> None:
    """Read until `ended(seconds)`, which waits at most so long, is True and the ring is empty."""
    writer, left_s, over = opened(job, ended), 0.0, False
    while True:
        room = ring.next()
        if room is not None:
            writer.read(parse(room))
            ring.release()
        now_s = time.monotonic()
        if now_s - left_s > STATUS_S:
            ring.share = writer.buffer.share
            ring.leave_status(json.dumps(writer.status()).encode())
            left_s = now_s
        if room is None:
            if over:
                break
            over = ended(LOOK_S)
    writer.close()
    ring.leave_status(json.dumps(writer.status()).encode())


def main(descriptor: str, job: str) -> None:
    logging.basicConfig(format="%(levelname)s %(message)s")
    os.nice(NICE)
    torch.set_num_threads(1)
    if hasattr(os, "sched_setaffinity"):
        # The engine binds its threads to cores and its children with them.
        os.sched_setaffinity(0, range(os.cpu_count() or 1))
    ended = end_of_engine()
    try:
        run(Ring(int(descriptor)), EngineJob(**json.loads(job)), ended)
    except UserError as error:
        logger.error("draftsmith: %s", error)
        sys.exit(REFUSED)


if __name__ == "__main__":
    main(*sys.argv[1:])
