"""Verified copies of versions on a local disk: each appears by one rename, and the latest two
stay."""

from __future__ import annotations

import contextlib
import hashlib
import os
import shutil
import time
from collections.abc import Callable, Collection, Mapping
from pathlib import Path

from draftsmith.files import atomic_folder
from draftsmith.fleet.store.layout import FileMark, StoreError, StoreUnreachable, folder_of

KEPT = 2
LEFTOVER_AGE_S = 3600.0

# Writes one file of a version, by its name in the layout, to a path.
Download = Callable[[str, Path], None]


class Cache:
    """One engine's copies: two engines with one folder would delete each other's."""

    def __init__(self, folder: str | Path):
        self.folder = Path(folder)

    def place(self, version: int, layout: str) -> Path:
        return self.folder / (f"{folder_of(version)}-{layout}" if layout else folder_of(version))

    def fetch(
        self,
        version: int,
        layout: str,
        marks: Mapping[str, FileMark],
        download: Download,
        *,
        held: Collection[int] = (),
    ) -> Path:
        """Folder of a whole copy: the one that is there, if every file is what `marks` says, or a
        new one. `held` versions are not deleted for it. A sentence names the first file that is
        otherwise."""
        place = self.place(version, layout)
        try:
            if not place.is_dir() or difference(place, marks):
                self._download(version, place, marks, download)
            os.utime(place)
            self._prune({version, *held})
        except OSError as error:
            # Of the local disk, not of the version.
            raise StoreUnreachable(
                f"version {version} cannot be kept in {str(self.folder)!r} ({error}); make room, "
                "or give another cache"
            ) from error
        return place

    def _download(
        self, version: int, place: Path, marks: Mapping[str, FileMark], download: Download
    ) -> None:
        self._sweep()
        try:
            with atomic_folder(place) as temporary:
                for name, mark in marks.items():
                    path = temporary / name
                    path.parent.mkdir(parents=True, exist_ok=True)
                    download(name, path)
                    if file_difference(name, path, mark):
                        # Cut on its way, perhaps.
                        download(name, path)
                if found := difference(temporary, marks):
                    raise StoreError(f"version {version} is refused: {found}; publish it again")
        except OSError:
            # Another process of this engine was faster.
            if not place.is_dir() or difference(place, marks):
                raise

    def _prune(self, held: Collection[int]) -> None:
        """Deletes all but the latest `KEPT` copies and the `held` versions."""
        names = {folder_of(version) for version in held}
        present = sorted(
            (path for path in self.folder.glob("v*") if path.is_dir()),
            key=lambda path: path.stat().st_mtime,
            reverse=True,
        )
        loose = [path for path in present if path.name.split("-")[0] not in names]
        room = max(0, KEPT - (len(present) - len(loose)))
        for path in loose[room:]:
            shutil.rmtree(path, ignore_errors=True)

    def _sweep(self) -> None:
        """Deletes what killed downloads left."""
        for path in self.folder.glob(".v*"):
            with contextlib.suppress(OSError):
                if time.time() - path.stat().st_mtime > LEFTOVER_AGE_S:
                    shutil.rmtree(path, ignore_errors=True)


def difference(folder: Path, marks: Mapping[str, FileMark]) -> str:
    """First file that is otherwise than its mark, in words; "" where all are the same and none is
    too many."""
    for name, mark in marks.items():
        if found := file_difference(name, folder / name, mark):
            return found
    present = {path.relative_to(folder).as_posix() for path in folder.rglob("*") if path.is_file()}
    extra = sorted(present - set(marks))
    return f"{extra[0]!r} is no file of it" if extra else ""


def file_difference(name: str, path: Path, mark: FileMark) -> str:
    if not path.is_file():
        return f"{name!r} is missing"
    if path.stat().st_size != mark.bytes:
        return f"{name!r} has {path.stat().st_size} bytes instead of {mark.bytes}"
    return "" if sha256_of(path) == mark.sha256 else f"{name!r} is not what was published"


def sha256_of(path: Path) -> str:
    digest = hashlib.sha256()
    with open(path, "rb") as handle:
        while chunk := handle.read(1 << 20):
            digest.update(chunk)
    return digest.hexdigest()
