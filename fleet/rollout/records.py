"""Served requests from the engines' records, for a rollout. Leaves no mark in the buffer: writers
wait for readers that do."""

from __future__ import annotations

from collections.abc import Iterable

from draftsmith.distill.buffer.buffer import BufferReader
from draftsmith.distill.buffer.folder import Cursor, Shard
from draftsmith.distill.buffer.traffic import SILENCE_S, OpenRequests, ServedText

# Shards written a little before the stage may hold records of it by another machine's clock.
SKEW_S = 60.0


class ServedTexts:
    """Reader of the texts that ended since the last call."""

    def __init__(self, url: str):
        self.reader = BufferReader(url, leaves_marks=False)
        self.open = OpenRequests()
        self.since_s: float | None = None

    def __call__(self, since_s: float) -> Iterable[ServedText]:
        if since_s != self.since_s:
            # Another stage: what came before it is not read, or read again after a restart.
            before = (since_s - SKEW_S) * 1000
            shards = self.reader.folder.shards()
            self.reader.cursor = passed([one for one in shards if one.time_ms < before])
            self.open, self.since_s = OpenRequests(), since_s
        while True:
            reading = self.reader.read()
            self.open.add(reading.records)
            yield from self.open.take(idle_s=SILENCE_S)
            # A shard that cannot be read now is tried again at the next call.
            if not reading.more or not reading.records:
                return


def passed(shards: Iterable[Shard]) -> Cursor:
    cursor: Cursor = {}
    for shard in shards:
        cursor[shard.writer] = max(shard.number, cursor.get(shard.writer, -1))
    return cursor
