"""`draftsmith forget`: deletion of one answer's records from the buffer. A mark stays there, by
which learners drop whatever they hold of the answer."""

from __future__ import annotations

import io
import logging
import time

import pyarrow as pa
import pyarrow.compute as pc

from draftsmith.distill.buffer import marks, record_table
from draftsmith.distill.buffer.folder import Shard, ShardFolder
from draftsmith.distill.config import ForgetConfig
from draftsmith.errors import UserError
from draftsmith.record import hashed_answer

logger = logging.getLogger("draftsmith.buffer")

# A server that has seen the mark writes nothing of it any more; what it had in hand before is
# written by then.
SETTLE_S = marks.LOOK_S + 3.0


def run(config: ForgetConfig) -> int:
    folder = ShardFolder(config.buffer)
    if not folder.names():
        raise UserError(
            f"buffer {config.buffer!r} is empty or not there; give the one that serve --learn "
            "writes to"
        )
    removed = forget(folder, config.request, settle_s=SETTLE_S)
    print(
        f"{removed} records of {config.request} were deleted; servers write no more of them, "
        "learners drop what they hold"
    )
    return 0


def forget(folder: ShardFolder, answer: str, *, settle_s: float) -> int:
    """Returns the number of deleted records. A second pass finds records that a server held in
    memory."""
    name = hashed_answer(answer)
    marks.forget(folder, name)
    removed = _sweep(folder, name)
    time.sleep(settle_s)
    return removed + _sweep(folder, name)


def _sweep(folder: ShardFolder, name: str) -> int:
    return sum(_without(folder, shard, name) for shard in folder.shards())


def _without(folder: ShardFolder, shard: Shard, name: str) -> int:
    """Rewrites a shard in place, whole or not at all."""
    try:
        data = folder.fetch(shard)
    except FileNotFoundError:
        return 0
    try:
        of_answer = _of_answer(data, name)
        if not pc.any(of_answer).as_py():
            return 0
        kept = record_table.read(io.BytesIO(data)).filter(pc.invert(of_answer))
    except (ValueError, OSError) as error:
        logger.warning(
            "shard %s is damaged and deleted, since its content is unknown (%s)",
            shard.path,
            error,
        )
        folder.delete(shard.name)
        return 0
    if kept.num_rows:
        rewritten = io.BytesIO()
        record_table.write(kept, rewritten)
        folder.write(shard.name, rewritten.getvalue())
    else:
        folder.delete(shard.name)
    return len(of_answer) - kept.num_rows


def _of_answer(data: bytes, name: str) -> pa.ChunkedArray:
    """Mask of the answer's records, which name their requests `ANSWER-NUMBER`."""
    return pc.starts_with(
        record_table.read(io.BytesIO(data), columns=["request"])["request"], f"{name}-"
    )
