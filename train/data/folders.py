"""Data folders with weights, as `--data FOLDER[:WEIGHT] ...` gives them, and the texts of an epoch
over them. Torch-free."""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np

from draftsmith.errors import UserError

# Purpose of the streams that order a folder's texts, at the end of their seeds. numpy fills seeds
# up with zeros: without it pass 0 of folder 3 would be the stream that orders epoch 3.
FOLDER_PASS = 1


class DataFolder(NamedTuple):
    path: str
    weight: float = 1.0  # passes over its texts in an epoch


class FolderPart(NamedTuple):
    """Texts of a folder among those of all: as many, behind those of the folders before it."""

    size: int
    weight: float = 1.0

    def drawn(self, epoch: int) -> tuple[int, int]:
        """(first, end) of the texts of an epoch in the endless stream of passes over the folder."""
        per_epoch = self.size * self.weight
        return round(epoch * per_epoch), round((epoch + 1) * per_epoch)


def folders_of(data: str | Sequence[str] | None) -> list[DataFolder]:
    """Folders of an option `data`, each with its weight: the number behind the last colon.
    `NAME:2/` is a folder whose name ends in a number.

    Raises:
        UserError: a weight that is not positive, or a folder that is named twice.
    """
    words = [data] if isinstance(data, str) else list(data or ())
    found = [_folder_of(word) for word in words]
    seen: set[Path] = set()
    for folder in found:
        if Path(folder.path) in seen:
            raise UserError(
                f"option 'data' names {folder.path!r} twice; give it once, with a weight such as "
                f"{folder.path}:2"
            )
        seen.add(Path(folder.path))
    return found


def _folder_of(word: str) -> DataFolder:
    path, _, number = word.rpartition(":")
    try:
        weight = float(number)
    except ValueError:
        return DataFolder(word)
    if not path:
        return DataFolder(word)
    if not 0 < weight < math.inf:
        raise UserError(
            f"option 'data' gives {path!r} the weight {number}; it must be more than 0 and finite"
        )
    return DataFolder(path, weight)


def shards_of(folder: str | Path) -> list[str]:
    """Files that hold the rows of a folder. Raises a `UserError` where there are none."""
    if not Path(folder).is_dir():
        raise UserError(
            f"data {str(folder)!r} is not a folder; give one written by `draftsmith generate`"
        )
    shards = sorted(str(path) for path in Path(folder).glob("part-*.parquet"))
    if not shards:
        raise UserError(
            f"data {str(folder)!r} holds no part-*.parquet file; give a folder written by "
            "`draftsmith generate`"
        )
    return shards


def check_folders(data: str | Sequence[str] | None) -> None:
    """Raises a `UserError` for a folder of an option `data` that holds no rows."""
    for folder in folders_of(data):
        shards_of(folder.path)


def named(data: str | Sequence[str] | None) -> str:
    """The folders of an option `data` for a sentence, quoted."""
    return ", ".join(repr(folder.path) for folder in folders_of(data))


def epoch_order(
    parts: Sequence[FolderPart], random: np.random.Generator, *, seed: int, epoch: int
) -> np.ndarray:
    """Indices of the texts of an epoch, in an order of `random`; which they are is a pure function
    of the other arguments.

    A folder of weight 2 is read twice in an epoch and one of weight 0.5 every other epoch, in a new
    order each time, so that none of its texts is drawn again before all the others were.
    """
    if all(part.weight == 1 for part in parts):
        return random.permutation(sum(part.size for part in parts))
    starts = np.cumsum([0, *(part.size for part in parts)])
    drawn = np.concatenate(
        [
            start + _passes(part, [seed, number], epoch)
            for number, (start, part) in enumerate(zip(starts, parts))
        ]
    )
    return drawn[random.permutation(len(drawn))]


def _passes(part: FolderPart, seed: Sequence[int], epoch: int) -> np.ndarray:
    """Indices within a folder that an epoch draws, from one or several passes over it."""
    if not part.size:
        return np.zeros(0, dtype=np.int64)
    first, end = part.drawn(epoch)
    whole = [
        np.random.default_rng([*seed, number, FOLDER_PASS]).permutation(part.size)
        for number in range(first // part.size, -(-end // part.size))
    ]
    begin = first // part.size * part.size
    return np.concatenate([[], *whole]).astype(np.int64)[first - begin : end - begin]
