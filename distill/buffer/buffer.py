"""Traffic buffer between the servers that write round records and the learner that reads them:
writer and reader.

Shards are Parquet files under one folder or fsspec URL, each whole or absent. There are many
writers, and every reader keeps its own cursor. `datasets.load_dataset("parquet", data_files=...)`
opens the folder as it is.
"""

from __future__ import annotations

import io
import logging
import threading
import time
import uuid
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import pyarrow as pa

from draftsmith.distill.buffer import record_table
from draftsmith.distill.buffer.folder import (
    LOOK_S,
    SETTLE_S,
    Cursor,
    Shard,
    ShardFolder,
    forget,
    forgotten,
    in_turn,
    is_forgotten,
    is_unread,
    leave_progress,
    parse,
    retain,
    sweep_progress,
    unread_bytes,
)
from draftsmith.errors import first_line
from draftsmith.record import RecordSink, RoundRecord, SinkCounts

logger = logging.getLogger("draftsmith.buffer")
# Looks at a shard that the file system does not give before it is skipped.
MAX_FAILURES = 10
# Age at which a shard is closed. In an object store each is a request that is paid for.
FOLDER_FLUSH_S, STORE_FLUSH_S = 1.0, 20.0
# Of a buffer, since without a learner nothing else bounds it.
MAX_BYTES = 8 << 30
# How long a server that stops waits for a disk that hangs.
CLOSE_S = 10.0
# Most bytes of hidden states in the queue; beyond it records are stored without. A shard is begun
# early at a fraction of it.
MAX_TAP_BYTES = 512 << 20
FLUSH_TAP_BYTES = 32 << 20
# Makes of a record those that may be stored now: none, or more when it was waited for.
Screen = Callable[[RoundRecord], list[RoundRecord]]


class FlushBatch(NamedTuple):
    """Front of a writer's queue, made ready once however often the disk refuses it."""

    taken: int
    table: pa.Table
    refused: int  # records that Arrow cannot hold


class BufferWriter(RecordSink):
    """`draftsmith.record.Sink` whose `put` only appends to a bounded queue. A thread writes a shard
    every `flush_s`, or whenever `flush_records` are queued.

    A killed server loses what was not yet flushed, at most `flush_s` of traffic. When the disk
    refuses or hangs, records wait in the queue and the newest beyond its bound are dropped;
    `dropped` counts them, `untapped` those that lost their hidden states alone. When readers are
    more than `backlog_bytes` behind, fewer requests are recorded, so that the unread part stops
    growing.

    Args:
        screens: applied in order on the writer's thread; each maps a record to the records that
            may be stored now.
        flush_s: `FOLDER_FLUSH_S` in a local folder and `STORE_FLUSH_S` elsewhere, unless given.
        share: of new requests that are recorded while readers keep up.
    """

    def __init__(
        self,
        url: str,
        *,
        screens: Sequence[Screen] = (),
        flush_s: float | None = None,
        flush_records: int = 512,
        queue_records: int = 16384,
        backlog_bytes: int = 64 << 20,
        share: float = 1.0,
    ):
        self.folder = ShardFolder(url)
        default_s = FOLDER_FLUSH_S if self.folder.is_local else STORE_FLUSH_S
        self.flush_s = default_s if flush_s is None else flush_s
        self.flush_records, self.queue_records = flush_records, queue_records
        self.screens, self.backlog_bytes = screens, backlog_bytes
        self.writer = uuid.uuid4().hex[:12]
        self.written = self.dropped = self.untapped = 0
        # Of the queue: one is counted by the thread that puts, the other by the one that writes.
        self._tap_bytes_put = self._tap_bytes_taken = 0
        self._number = 0
        self._most = self._share = share
        self._forgotten: frozenset[str] = frozenset()
        self._looked_s = -LOOK_S
        self._queue: deque[RoundRecord] = deque()
        self._batch: FlushBatch | None = None
        self._wake = threading.Event()
        self._closing = False
        self._patience_s = 0.0  # after `close`
        self._failing = False
        self.folder.make()
        self._thread = threading.Thread(target=self._run, name="buffer-writer", daemon=True)
        self._thread.start()

    @property
    def share(self) -> float:
        # A queue that fills is a disk that does not follow: room is left for the requests that are
        # recorded already.
        is_full = len(self._queue) > self.queue_records // 2 or self._tap_bytes > MAX_TAP_BYTES // 2
        return 0.0 if is_full else self._share

    @property
    def counts(self) -> SinkCounts:
        return SinkCounts(self.written, self.dropped, untapped=self.untapped)

    @property
    def num_queued(self) -> int:
        """Records that are not written yet."""
        return len(self._queue)

    @property
    def _tap_bytes(self) -> int:
        return self._tap_bytes_put - self._tap_bytes_taken

    def put(self, record: RoundRecord) -> None:
        if len(self._queue) >= self.queue_records or self._closing:
            self.dropped += 1
            return
        if self._tap_bytes + record.tap_bytes > MAX_TAP_BYTES:
            record.taps = None
            self.untapped += 1
        self._tap_bytes_put += record.tap_bytes
        self._queue.append(record)
        if len(self._queue) >= self.flush_records or self._tap_bytes >= FLUSH_TAP_BYTES:
            self._wake.set()

    def forget(self, answer: str) -> int:
        """Deletes the records of one answer, by the id that its client was given, and returns their
        number. Takes some seconds, so that servers that write into the same buffer have read the
        mark."""
        return forget(self.folder, answer, settle_s=SETTLE_S)

    def close(self, *, patience_s: float = 0.0) -> None:
        """Flushes the queue. Where the disk refuses, tries for `patience_s`, at least once; does
        not wait long for one that hangs."""
        self._patience_s, self._closing = patience_s, True
        self._wake.set()
        self._thread.join(CLOSE_S + patience_s)
        if self._thread.is_alive():
            logger.error("buffer %s hangs; %d records are lost", self.folder.url, len(self._queue))

    def _run(self) -> None:
        while not self._closing:
            self._wake.wait(self.flush_s)
            self._wake.clear()
            self._look()
            self._flush()
        deadline_s = time.monotonic() + self._patience_s
        self._flush()
        while self._queue and time.monotonic() < deadline_s:
            time.sleep(min(self.flush_s, FOLDER_FLUSH_S))
            self._flush()
        self.dropped += len(self._queue)

    def _look(self) -> None:
        """Reads the readers' progress and the forgotten answers."""
        now_s = time.monotonic()
        if now_s - self._looked_s < LOOK_S:
            return
        self._looked_s = now_s
        try:
            names = self.folder.names()
            unread = unread_bytes(self.folder, names)
            self._forgotten = forgotten(names)
        except OSError as error:
            logger.debug("buffer %s cannot be looked into (%s)", self.folder.url, error)
            return
        self._share = self._most * min(1.0, self.backlog_bytes / max(1, unread))

    def _flush(self) -> None:
        while self._queue:
            if self._batch is None:
                self._batch = self._prepare(min(len(self._queue), self.flush_records))
            if self._batch.table.num_rows and not self._write(self._batch.table):
                return
            for _ in range(self._batch.taken):
                self._tap_bytes_taken += self._queue.popleft().tap_bytes
            self.written += self._batch.table.num_rows
            self.dropped += self._batch.refused
            self._batch = None

    def _prepare(self, taken: int) -> FlushBatch:
        records = [self._queue[index] for index in range(taken)]
        records = [one for one in records if not is_forgotten(one.request, self._forgotten)]
        for screen in self.screens:
            records = [ready for record in records for ready in screen(record)]
        table, kept = tabulate(records)
        return FlushBatch(taken, table, len(records) - kept)

    def _write(self, table: pa.Table) -> bool:
        """Returns False when the disk refused: the records stay queued."""
        data = io.BytesIO()
        record_table.write(table, data)
        try:
            self.folder.put(
                f"{int(time.time() * 1000):013d}-{self.writer}-{self._number:08d}.parquet",
                data.getvalue(),
            )
        except OSError as error:
            if not self._failing:
                logger.error(
                    "buffer %s cannot be written (%s); records wait and the newest are dropped",
                    self.folder.url,
                    error,
                )
            self._failing = True
            return False
        if self._failing:
            logger.warning("buffer %s can be written again", self.folder.url)
        self._failing = False
        self._number += 1
        if self._number % 64 == 0:
            self._bound()
        return True

    def _bound(self) -> None:
        """Deletes old shards."""
        try:
            retain(self.folder, {}, max_bytes=MAX_BYTES, max_age_s=float("inf"))
        except OSError as error:
            logger.warning("buffer %s cannot be cleaned (%s)", self.folder.url, error)


def tabulate(records: list[RoundRecord]) -> tuple[pa.Table, int]:
    """Returns the table and its number of records. A record that Arrow refuses (an id beyond 32
    bits) is left out, its neighbours stay."""
    try:
        return record_table.to_table(records), len(records)
    except (ValueError, TypeError, OverflowError) as error:
        if len(records) == 1:
            logger.error("a round record cannot be stored (%s); it is dropped", error)
            return record_table.to_table([]), 0
    parts = [tabulate([record]) for record in records]
    return pa.concat_tables([table for table, _ in parts]), sum(kept for _, kept in parts)


@dataclass(frozen=True)
class BufferReading:
    records: list[RoundRecord]
    more: bool  # whether shards are left
    damaged: int
    # Answers whose records may be kept nowhere any more; `is_forgotten` decides by a record's
    # request.
    forgotten: frozenset[str] = frozenset()
    # records left out because the draws behind them can be repeated; see `RoundRecord.seeded`
    seeded: int = 0
    shards: int = 0  # that were passed


class BufferReader:
    """Reader that returns each shard once. The caller saves the cursor together with the state that
    the records led to, by one rename.

    Args:
        with_taps: records come with the hidden states that they hold.
        leaves_marks: writers wait for the reader.
    """

    def __init__(
        self,
        url: str,
        cursor: Cursor | None = None,
        *,
        with_taps: bool = False,
        leaves_marks: bool = True,
    ):
        self.folder, self.with_taps = ShardFolder(url), with_taps
        self.leaves_marks = leaves_marks
        self.cursor: Cursor = dict(cursor or {})
        self.damaged = 0
        self.name = uuid.uuid4().hex[:12]
        self._marked_s = -LOOK_S
        self._failures = 0  # in a row, at the first unread shard

    def read(self, *, max_records: int = 4096) -> BufferReading:
        """New records in the order of their shards, whole shards until `max_records` is passed.

        Records of seeded sampled requests are left out here, whichever server wrote them, so that
        nothing is learned, scored or decided by them.
        """
        # First whatever the file system may refuse: behind the cursor nothing is read again. One
        # listing, since stores charge.
        names = self.folder.names()
        answers = forgotten(names)
        unread = in_turn(
            [shard for shard in self.folder.shards_among(names) if is_unread(shard, self.cursor)]
        )
        records: list[RoundRecord] = []
        done, damaged = 0, self.damaged
        for shard in unread:
            found = self._take(shard) if len(records) < max_records else None
            if found is None:
                break
            records += found
            self.cursor[shard.writer] = max(shard.number, self.cursor.get(shard.writer, -1))
            done += 1
        self.mark()
        unseeded = [record for record in records if not record.seeded]
        kept = [record for record in unseeded if not is_forgotten(record.request, answers)]
        seeded = len(records) - len(unseeded)
        return BufferReading(
            kept, done < len(unread), self.damaged - damaged, answers, seeded, done
        )

    def mark(self) -> None:
        """Writes the reader's progress, which also shows writers that it is alive. A reader without
        write access to the buffer leaves no mark, and writers do not wait for it."""
        now_s = time.monotonic()
        if not self.leaves_marks or now_s - self._marked_s < LOOK_S:
            return
        self._marked_s = now_s
        try:
            leave_progress(self.folder, self.name, self.cursor)
        except OSError as error:
            logger.debug("buffer %s takes no mark (%s)", self.folder.url, error)

    def _take(self, shard: Shard) -> list[RoundRecord] | None:
        """Records of a shard, or None when the file system fails, which may pass. A shard that
        stays unreadable is skipped in the end."""
        try:
            data = self.folder.read(shard.name)
        except FileNotFoundError:
            logger.info("shard %s was deleted before it was read", shard.path)
            return []
        except OSError as error:
            self._failures += 1
            logger.warning(
                "shard %s cannot be read (%s), attempt %d of %d",
                shard.path,
                error,
                self._failures,
                MAX_FAILURES,
            )
            if self._failures < MAX_FAILURES:
                return None
            data = b""
        self._failures = 0
        try:
            return parse(data, with_taps=self.with_taps)
        except (OSError, ValueError) as error:
            logger.warning("shard %s is damaged and skipped (%s)", shard.path, first_line(error))
            self.damaged += 1
            return []

    def forget_gone_writers(self) -> None:
        """Drops writers whose shards are deleted. Every server start is a new writer and never uses
        an old name again."""
        present = {shard.writer for shard in self.folder.shards()}
        newest = {writer: number for writer, number in self.cursor.items() if writer in present}
        self.cursor = newest
        sweep_progress(self.folder)
