"""Folder of a buffer on any file system that fsspec supports: shards of round records named by
time, writer and number, cursors of readers, and retention."""

from __future__ import annotations

import io
import json
import logging
import re
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import pyarrow as pa
import pyarrow.compute as pc
from fsspec.implementations.memory import MemoryFileSystem

from draftsmith.distill.buffer import record_table
from draftsmith.distill.buffer.objects import Objects
from draftsmith.distill.config import ForgetConfig
from draftsmith.errors import UserError
from draftsmith.files import LEFTOVER_AGE_S, sweep
from draftsmith.progress import say
from draftsmith.record import RoundRecord, hashed_answer

logger = logging.getLogger("draftsmith.buffer")
Cursor = dict[str, int]  # writer -> number of its last shard that was read
NAME = re.compile(r"(?P<time_ms>\d{13,})-(?P<writer>[0-9a-z]+)-(?P<number>\d{8})\.parquet")


@dataclass(frozen=True, order=True)
class Shard:
    time_ms: int
    writer: str
    number: int
    path: str = field(compare=False)
    bytes: int = field(compare=False)

    @property
    def name(self) -> str:
        return self.path.rsplit("/", 1)[-1]


class ShardFolder(Objects):
    """Root of a buffer."""

    noun = "buffer"

    def shards(self) -> list[Shard]:
        return self.shards_among(self.names())

    def shards_among(self, names: Mapping[str, int]) -> list[Shard]:
        """Shards in order of time; `names` as listed."""
        found = []
        for name, size in names.items():
            if match := NAME.fullmatch(name):
                time_ms, number = int(match["time_ms"]), int(match["number"])
                found.append(Shard(time_ms, match["writer"], number, self.path(name), size))
        return sorted(found)

    @property
    def is_memory(self) -> bool:
        """True for a folder that never reaches a disk."""
        if not self.is_local:
            return isinstance(self.fs, MemoryFileSystem)
        return file_system_of(Path(self.root)) in ("tmpfs", "ramfs")

    def make(self) -> None:
        """Makes the folder where file systems have such."""
        if self.is_local:
            Path(self.root).mkdir(parents=True, exist_ok=True)


def file_system_of(path: Path) -> str:
    """Type of the mount that holds `path`; "" where the system does not report it."""
    table = Path("/proc/self/mounts")
    if not table.exists():
        return ""
    found, kind = "", ""
    with table.open(encoding="utf-8", errors="surrogateescape") as lines:
        for line in lines:
            _, place, fs_type, *_ = line.split(" ")
            if len(place) >= len(found) and path.absolute().is_relative_to(place):
                found, kind = place, fs_type
    return kind


def in_turn(shards: Sequence[Shard]) -> list[Shard]:
    """Shards by time, and each writer's by number: its clock may be set back, but a cursor has
    passed all numbers below its own."""
    by_number = sorted(shards, key=lambda shard: shard.number)
    own = {
        writer: iter([one for one in by_number if one.writer == writer])
        for writer in {shard.writer for shard in shards}
    }
    return [next(own[shard.writer]) for shard in sorted(shards)]


def is_unread(shard: Shard, cursor: Cursor) -> bool:
    return shard.number > cursor.get(shard.writer, -1)


def parse(data: bytes, *, with_taps: bool = True) -> list[RoundRecord]:
    """Records of a shard. Raises `ValueError` or `OSError` when it is damaged."""
    table = record_table.read(io.BytesIO(data), with_taps=with_taps)
    try:
        return record_table.from_table(table)
    except (AttributeError, LookupError, TypeError) as error:
        raise ValueError(f"a column is of another type ({error})") from error


def retain(folder: ShardFolder, cursor: Cursor, *, max_bytes: int, max_age_s: float) -> list[Shard]:
    """Deletes read shards that are too old, then the oldest until the size fits: read ones first,
    unread ones only if it must. Returns the deleted ones."""
    if folder.is_local:
        sweep(folder.root, older_than_s=LEFTOVER_AGE_S)
    present = folder.shards()
    now_ms = time.time() * 1000
    doomed = [
        shard
        for shard in present
        if not is_unread(shard, cursor) and now_ms - shard.time_ms > max_age_s * 1000
    ]
    size = sum(shard.bytes for shard in present) - sum(shard.bytes for shard in doomed)
    left = sorted(
        (shard for shard in present if shard not in set(doomed)),
        key=lambda shard: (is_unread(shard, cursor), shard),
    )
    for shard in left:
        if size <= max_bytes:
            break
        doomed.append(shard)
        size -= shard.bytes
    for shard in doomed:
        folder.delete(shard.name)
    unread = sum(is_unread(shard, cursor) for shard in doomed)
    if unread and cursor:
        logger.warning(
            "buffer %s passed %d bytes: %d shards were deleted unread",
            folder.url,
            max_bytes,
            unread,
        )
    return doomed


PROGRESS = re.compile(r"reader-[0-9a-z]+\.json")
FORGOTTEN = re.compile(r"forgotten-(?P<answer>[0-9a-f]{16})")
# Between two looks of a writer at them, between two that a reader leaves.
LOOK_S = 2.0
# A reader that has left no mark for so long is taken as gone; a learner leaves some while it rests,
# too.
GONE_S = 600.0


def leave_progress(folder: ShardFolder, reader: str, cursor: Cursor) -> None:
    mark = {"time_s": time.time(), "cursor": cursor}
    folder.put(f"reader-{reader}.json", json.dumps(mark).encode())


def unread_bytes(folder: ShardFolder, names: Mapping[str, int]) -> int:
    """Bytes that the slowest reader has not read; 0 without readers. `names` is the listing of the
    folder."""
    cursors = []
    for name in names:
        if PROGRESS.fullmatch(name):
            mark = _progress(folder, name)
            if mark is not None and time.time() - mark["time_s"] < GONE_S:
                cursors.append(mark["cursor"])
    shards = folder.shards_among(names) if cursors else []
    return max(
        (sum(shard.bytes for shard in shards if is_unread(shard, cursor)) for cursor in cursors),
        default=0,
    )


def sweep_progress(folder: ShardFolder) -> None:
    """Deletes marks of readers that are gone."""
    for name in folder.names():
        if PROGRESS.fullmatch(name):
            mark = _progress(folder, name)
            if mark is None or time.time() - mark["time_s"] > GONE_S:
                folder.delete(name)


def _progress(folder: ShardFolder, name: str) -> dict | None:
    try:
        mark = json.loads(folder.read(name))
        return (
            mark if isinstance(mark["time_s"], float) and isinstance(mark["cursor"], dict) else None
        )
    except (OSError, ValueError, KeyError, TypeError):
        # Gone, or being replaced on a file system without renames: the next look will do.
        return None


def mark_forgotten(folder: ShardFolder, answer: str) -> None:
    """Marks an answer: servers write none of its records from then on, readers return none and
    learners drop what they hold."""
    folder.put(f"forgotten-{answer}", b"")


def forgotten(names: Iterable[str]) -> frozenset[str]:
    """Hashed ids of forgotten answers, from a folder's listing."""
    found = (FORGOTTEN.fullmatch(name) for name in names)
    return frozenset(match["answer"] for match in found if match)


def is_forgotten(request: str, answers: frozenset[str]) -> bool:
    return bool(answers) and request.partition("-")[0] in answers


def check_written(url: str) -> None:
    """Raises `UserError` for a buffer that holds no records."""
    try:
        shards = ShardFolder(url).shards()
    except OSError as error:
        raise UserError(f"buffer {url!r} cannot be read ({error}); give its folder") from error
    if not shards:
        raise UserError(
            f"buffer {url!r} holds no records or is not there; give the one that serve --learn "
            "writes to"
        )


# A server that has seen the mark writes nothing of it any more; what it had in hand before is
# written by then.
SETTLE_S = LOOK_S + 3.0


def run(config: ForgetConfig) -> int:
    folder = ShardFolder(config.buffer)
    if not folder.names():
        raise UserError(
            f"buffer {config.buffer!r} is empty or not there; give the one that serve --learn "
            "writes to"
        )
    say(f"deleting it twice, {SETTLE_S:g} s apart, in which servers write what they still hold")
    removed = forget(folder, config.request, settle_s=SETTLE_S)
    if removed == 0:
        raise UserError(
            f"no record of {config.request!r} is in buffer {config.buffer!r}; it is marked, so "
            "that servers write no more of it and learners drop what they hold; unless its records "
            "were deleted before, give the id as the server gave it"
        )
    print(
        f"{removed} records of {config.request} were deleted; servers write no more of them, "
        "learners drop what they hold"
    )
    return 0


def forget(folder: ShardFolder, answer: str, *, settle_s: float) -> int:
    """Returns the number of deleted records. A second pass finds records that a server held in
    memory."""
    name = hashed_answer(answer)
    mark_forgotten(folder, name)
    removed = _sweep(folder, name)
    time.sleep(settle_s)
    return removed + _sweep(folder, name)


def _sweep(folder: ShardFolder, name: str) -> int:
    return sum(_without(folder, shard, name) for shard in folder.shards())


def _without(folder: ShardFolder, shard: Shard, name: str) -> int:
    """Rewrites a shard in place, whole or not at all."""
    try:
        data = folder.read(shard.name)
    except FileNotFoundError:
        return 0
    try:
        of_answer = _of_answer(data, name)
        if not pc.any(of_answer).as_py():
            return 0
        kept = record_table.read(io.BytesIO(data)).filter(pc.invert(of_answer))
    except (ValueError, OSError) as error:
        logger.warning(
            "shard %s is damaged and deleted, since its content is unknown (%s)", shard.path, error
        )
        folder.delete(shard.name)
        return 0
    if kept.num_rows:
        rewritten = io.BytesIO()
        record_table.write(kept, rewritten)
        folder.put(shard.name, rewritten.getvalue())
    else:
        folder.delete(shard.name)
    return len(of_answer) - kept.num_rows


def _of_answer(data: bytes, name: str) -> pa.ChunkedArray:
    """Mask of the answer's records, which name their requests `ANSWER-NUMBER`."""
    return pc.starts_with(
        record_table.read(io.BytesIO(data), columns=["request"])["request"], f"{name}-"
    )
