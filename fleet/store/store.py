"""Versions of a fleet behind one address: what an engine should serve, verified copies of it, and
the engines' statuses."""

from __future__ import annotations

import os
import shutil
import tempfile
import time
from collections.abc import Callable, Collection, Mapping
from functools import cached_property
from pathlib import Path
from typing import Any

from draftsmith.distill.buffer.objects import Objects
from draftsmith.drafters.versions import CURRENT, FOLDER, MANIFEST
from draftsmith.files import LEFTOVER_AGE_S, atomic_folder, files_in, sha256_of, sweep
from draftsmith.fleet.store.layout import (
    ENGINES,
    EngineStatus,
    FileMark,
    StoreError,
    StoreUnreachable,
    current_bytes,
    files_of,
    folder_of,
    object_of,
    parse_current,
    parse_manifest,
    parse_status,
)

KEPT = 2  # local copies, those in use among them


class VersionStore(Objects):
    """A store at a folder or fsspec URL.

    Every method raises `StoreError` for what is refused and its subclass `StoreUnreachable` for a
    store that does not answer `attempts` times in a row, each in one sentence; a follower keeps
    what it serves on both.

    Args:
        cache: folder of the local copies, of this engine alone; a temporary one by default.
    """

    noun, attempts = "versions", 3

    def __init__(
        self,
        url: str,
        *,
        cache: str | Path | None = None,
        sleep: Callable[[float], None] = time.sleep,
    ):
        super().__init__(url, sleep=sleep)
        self._cache = cache

    def refusal(self, sentence: str) -> Exception:
        return StoreError(sentence)

    def failure(self, error: Exception) -> Exception:
        said = str(error).strip().split("\n")[0] or "no reason given"
        return StoreUnreachable(
            f"versions {self.url!r} cannot be reached ({type(error).__name__}: {said}); "
            "what is served stays"
        )

    @cached_property
    def copies(self) -> Path:
        """Folder of this engine's copies: two engines with one would delete each other's."""
        return Path(self._cache or tempfile.mkdtemp(prefix="draftsmith-versions-"))

    def current(self) -> int | None:
        """The live version, which all engines should serve; None before the first."""
        try:
            return parse_current(self.read(CURRENT))
        except FileNotFoundError:
            return None

    def manifest(self, version: int) -> dict[str, Any]:
        """Manifest of a version. One without is not published: half uploaded, or pruned."""
        try:
            data = self.read(f"{folder_of(version)}/{MANIFEST}")
        except FileNotFoundError as error:
            raise StoreError(
                f"version {version} is not in {self.url!r}, or only a part of it; it is not served"
            ) from error
        return parse_manifest(data, version)

    def versions(self) -> list[int]:
        """Numbers of all folders, ascending; some of them may be half uploaded."""
        names = [FOLDER.fullmatch(name) for name in self.names()]
        return sorted(int(match[1]) for match in names if match)

    def fetch(self, version: int, layout: str = "", *, held: Collection[int] = ()) -> Path:
        """Local folder of a version in one layout, "" for the checkpoint itself. Every file has the
        size and sha256 of the manifest, also in a copy that was there. The latest two copies stay,
        and those of the `held` versions, such as the one being served."""
        marks = files_of(self.manifest(version), layout)
        place = self.copies / "-".join(filter(None, (folder_of(version), layout)))
        try:
            if not place.is_dir() or difference(place, marks):
                self._copy(version, layout, place, marks)
            os.utime(place)
            self._prune({version, *held})
        except OSError as error:
            # Of the local disk, not of the version.
            raise StoreUnreachable(
                f"version {version} cannot be kept in {str(self.copies)!r} ({error}); make room, "
                "or give another cache"
            ) from error
        return place

    def _copy(self, version: int, layout: str, place: Path, marks: Mapping[str, FileMark]) -> None:
        """A sentence names the first file that is otherwise than its mark."""
        sweep(self.copies, older_than_s=LEFTOVER_AGE_S)
        source = "/".join(filter(None, (folder_of(version), layout)))
        try:
            with atomic_folder(place) as temporary:
                for name, mark in marks.items():
                    path = temporary / name
                    path.parent.mkdir(parents=True, exist_ok=True)
                    self._download(f"{source}/{name}", path)
                    if file_difference(name, path, mark):
                        # Cut on its way, perhaps.
                        self._download(f"{source}/{name}", path)
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
            (path for path in self.copies.glob("v*") if path.is_dir()),
            key=lambda path: path.stat().st_mtime,
            reverse=True,
        )
        loose = [path for path in present if path.name.split("-")[0] not in names]
        room = max(0, KEPT - (len(present) - len(loose)))
        for path in loose[room:]:
            shutil.rmtree(path, ignore_errors=True)

    def _download(self, name: str, path: Path) -> None:
        try:
            self.download(name, path)
        except FileNotFoundError:
            # A file that is missing is reported as any other difference.
            path.unlink(missing_ok=True)

    def put_engine(self, status: EngineStatus) -> None:
        self.put(object_of(status.engine), status.to_json())

    def engines(self) -> list[EngineStatus]:
        """Latest status of every engine, by id. One that cannot be read is left out."""
        names = [name for name in self.names(ENGINES) if name.endswith(".json")]
        found = []
        for data in self.read_all(f"{ENGINES}/{name}" for name in names).values():
            try:
                found.append(parse_status(data))
            except StoreError:
                continue
        return sorted(found, key=lambda status: status.engine)

    # Writing: by the publisher and an operator's commands.

    def put_manifest(self, version: int, data: bytes) -> None:
        """Makes a version visible; its files are there already."""
        parse_manifest(data, version)
        self.put(f"{folder_of(version)}/{MANIFEST}", data)

    def put_current(self, version: int) -> None:
        """Makes a version live. Raises `StoreError` for one that is not whole."""
        self.manifest(version)
        self.put(CURRENT, current_bytes(version))

    def delete_version(self, version: int) -> None:
        """Deletes a version, its manifest first, so that no reader takes the rest for one."""
        self.delete(f"{folder_of(version)}/{MANIFEST}")
        self.delete(folder_of(version))


def difference(folder: Path, marks: Mapping[str, FileMark]) -> str:
    """First file that is otherwise than its mark, in words; "" where all are the same and none is
    too many."""
    for name, mark in marks.items():
        if found := file_difference(name, folder / name, mark):
            return found
    extra = sorted(files_in(folder).keys() - marks.keys())
    return f"{extra[0]!r} is no file of it" if extra else ""


def file_difference(name: str, path: Path, mark: FileMark) -> str:
    if not path.is_file():
        return f"{name!r} is missing"
    if path.stat().st_size != mark.bytes:
        return f"{name!r} has {path.stat().st_size} bytes instead of {mark.bytes}"
    return "" if sha256_of(path) == mark.sha256 else f"{name!r} is not what was published"
