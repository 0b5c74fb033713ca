"""`draftsmith forget`: the records of one answer leave the buffer, and with the mark that stays there everything made of it."""

from __future__ import annotations

import logging
import time

from draftsmith.distill import marks, record_table
from draftsmith.distill.buffer import LOOK_S
from draftsmith.distill.config import ForgetConfig
from draftsmith.distill.folder import Folder, Shard, parse
from draftsmith.errors import UserError
from draftsmith.serve.record import hashed_answer

logger = logging.getLogger("draftsmith.buffer")

# A server that has seen the mark writes nothing of it any more; what it had in hand before is written by then.
SETTLE_S = LOOK_S + 3.0


def run(config: ForgetConfig) -> int:
    folder = Folder(config.buffer)
    if not folder.names():
        raise UserError(f"buffer {config.buffer!r} is empty or not there; give the one that serve --learn writes to")
    removed = forget(folder, config.request, settle_s=SETTLE_S)
    print(f"{removed} records of {config.request} were deleted; servers write no more of them, learners drop what they hold")
    return 0


def forget(folder: Folder, answer: str, *, settle_s: float) -> int:
    """How many records were deleted; a second pass finds what a server still had in hand."""
    name = hashed_answer(answer)
    marks.forget(folder, name)
    removed = _sweep(folder, name)
    time.sleep(settle_s)
    return removed + _sweep(folder, name)


def _sweep(folder: Folder, name: str) -> int:
    return sum(_without(folder, shard, name) for shard in folder.shards())


def _without(folder: Folder, shard: Shard, name: str) -> int:
    """Rewrites a shard in place, whole or not at all."""
    try:
        records = parse(folder.fetch(shard))
    except FileNotFoundError:
        return 0
    except ValueError as error:
        logger.warning("shard %s is damaged and deleted, since nobody can tell what is in it (%s)", shard.path, error)
        folder.delete(shard)
        return 0
    kept = [record for record in records if not marks.is_forgotten(record.request, frozenset([name]))]
    if len(kept) == len(records):
        return 0
    if kept:
        folder.write(shard.path.rsplit("/", 1)[-1], record_table.to_bytes(kept))
    else:
        folder.delete(shard)
    return len(records) - len(kept)
