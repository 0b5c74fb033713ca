"""Marks beside the shards of a buffer: the progress of each reader, and the answers whose records
are to be forgotten."""

from __future__ import annotations

import json
import re
import time
from collections.abc import Iterable, Mapping

from draftsmith.distill.buffer.folder import Cursor, ShardFolder, is_unread

PROGRESS = re.compile(r"reader-[0-9a-z]+\.json")
FORGOTTEN = re.compile(r"forgotten-(?P<answer>[0-9a-f]{16})")
# Between two looks of a writer at them, between two that a reader leaves.
LOOK_S = 2.0
# A reader that has left no mark for so long is taken as gone; a learner leaves some while it rests,
# too.
GONE_S = 600.0


def leave_progress(folder: ShardFolder, reader: str, cursor: Cursor) -> None:
    mark = {"time_s": time.time(), "cursor": cursor}
    folder.write(f"reader-{reader}.json", json.dumps(mark).encode())


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


def sweep(folder: ShardFolder) -> None:
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


def forget(folder: ShardFolder, answer: str) -> None:
    """Marks an answer: servers write none of its records from then on, readers return none and
    learners drop what they hold."""
    folder.write(f"forgotten-{answer}", b"")


def forgotten(names: Iterable[str]) -> frozenset[str]:
    """Hashed ids of forgotten answers, from a folder's listing."""
    found = (FORGOTTEN.fullmatch(name) for name in names)
    return frozenset(match["answer"] for match in found if match)


def is_forgotten(request: str, answers: frozenset[str]) -> bool:
    return bool(answers) and request.partition("-")[0] in answers
