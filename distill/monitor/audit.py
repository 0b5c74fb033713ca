"""One look at a whole buffer, also while servers write into it. Leaves no mark: writers wait for
readers that do."""

from __future__ import annotations

import logging
from dataclasses import dataclass

from draftsmith.distill.buffer import marks
from draftsmith.distill.buffer.folder import ShardFolder, in_turn, parse
from draftsmith.distill.monitor.monitor import Monitor
from draftsmith.errors import UserError, first_line

logger = logging.getLogger("draftsmith.buffer")


@dataclass
class Look:
    monitor: Monitor
    shards: int = 0
    records: int = 0
    seeded: int = 0  # records whose draws can be repeated, left out
    damaged: int = 0  # shards


def look(url: str, *, false_alarm: float) -> Look:
    """Reads every shard that is there now. Raises `UserError` where the folder cannot be read."""
    folder, found = ShardFolder(url), Look(Monitor(false_alarm))
    try:
        names = folder.names()
    except OSError as error:
        raise UserError(f"buffer {url!r} cannot be read ({error}); give its folder") from error
    answers = marks.forgotten(names)
    for shard in in_turn(folder.shards_among(names)):
        try:
            records = parse(folder.fetch(shard), with_taps=False)
        except FileNotFoundError:
            continue  # deleted by the retention since it was listed
        except (OSError, ValueError) as error:
            logger.warning("shard %s is left out (%s)", shard.path, first_line(error))
            found.damaged += 1
            continue
        kept = [one for one in records if not one.seeded]
        found.shards, found.records = found.shards + 1, found.records + len(records)
        found.seeded += len(records) - len(kept)
        found.monitor.look([one for one in kept if not marks.is_forgotten(one.request, answers)])
    return found
