"""Files of round records in a saved state."""

from __future__ import annotations

import operator
import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

import pyarrow.parquet as pq

from draftsmith.distill.buffer import record_table
from draftsmith.record import RoundRecord


class WrittenRecords(NamedTuple):
    records: Sequence[RoundRecord]
    num_bytes: int  # of the file


class RecordFiles:
    """Files of records of the state saved last. A file that is to hold the same records again, as
    at the second save around a publication, is copied."""

    def __init__(self) -> None:
        self._last: dict[Path, WrittenRecords] = {}
        self._new: dict[Path, WrittenRecords] = {}  # by the file's place in its state
        self._folder = Path()

    def write(self, folder: Path, name: str | Path, records: Sequence[RoundRecord]) -> None:
        """Writes the records to `name`, a place in the state's `folder`, by which the same file is
        found again at the next save."""
        path, known = Path(name), self._last.get(Path(name))
        if known is not None and _are_same(known.records, records) and self._is_whole(path):
            shutil.copyfile(self._folder / path, folder / path)
        else:
            pq.write_table(record_table.to_table(records), folder / path, compression="zstd")
        self._new[path] = WrittenRecords(records, (folder / path).stat().st_size)

    def _is_whole(self, path: Path) -> bool:
        place = self._folder / path
        return place.is_file() and place.stat().st_size == self._last[path].num_bytes

    def written(self, folder: Path) -> None:
        """Notes that all files of a state are in place in `folder`."""
        self._folder, self._last, self._new = folder, self._new, {}

    def release(self) -> None:
        """Holds no records any longer, which would stay in memory when nothing else needs them."""
        self._last, self._new = {}, {}


def _are_same(some: Sequence[RoundRecord], others: Sequence[RoundRecord]) -> bool:
    return len(some) == len(others) and all(map(operator.is_, some, others))
