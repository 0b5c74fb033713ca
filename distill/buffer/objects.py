"""Bytes of the objects below one address, on any file system that fsspec supports: an object
appears by a rename or by one put. Loads neither Arrow nor torch, which an engine's process that
follows versions has no use for."""

from __future__ import annotations

import random
import shutil
import time
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any, ClassVar, TypeVar

from draftsmith import files
from draftsmith.errors import UserError

T = TypeVar("T")
FIRST_WAIT_S = 0.2  # doubled at each attempt, and varied by half of it


class Objects:
    """Objects by names such as `v000007/manifest.json`. A missing one is a `FileNotFoundError`.
    Another error, of object stores and their libraries too, is an `OSError`, once `attempts` in a
    row have failed."""

    noun: ClassVar[str] = "objects"
    attempts: ClassVar[int] = 1

    def __init__(self, url: str, *, sleep: Callable[[float], None] = time.sleep):
        # Imported here: an engine that follows no versions may lack it.
        import fsspec
        from fsspec.implementations.local import LocalFileSystem

        try:
            self.fs, self.root = fsspec.core.url_to_fs(url)
        except (ValueError, ImportError) as error:
            raise self.refusal(
                f"{self.noun} {url!r} cannot be opened ({error}); give a folder or an fsspec URL"
            ) from error
        self.url, self.sleep = url, sleep
        self.is_local = isinstance(self.fs, LocalFileSystem)

    def refusal(self, sentence: str) -> Exception:
        return UserError(sentence)

    def failure(self, error: Exception) -> Exception:
        return error if isinstance(error, OSError) else OSError(f"{type(error).__name__}: {error}")

    def read(self, name: str) -> bytes:
        return self._tried(lambda: self.fs.cat_file(self.path(name)))

    def read_all(self, names: Iterable[str]) -> dict[str, bytes]:
        """Contents by name, of many objects at once; those that are gone are left out."""
        paths = {self.path(name): name for name in names}
        found: Mapping[str, bytes] = self._tried(
            lambda: self.fs.cat(list(paths), on_error="omit") if paths else {}
        )
        return {paths[path]: data for path, data in found.items() if path in paths}

    def download(self, name: str, path: Path) -> None:
        self._tried(lambda: self.fs.get_file(self.path(name), str(path)))

    def put(self, name: str, data: bytes) -> None:
        """Writes whole or not at all: a rename where there is one, a single put elsewhere."""
        if not self.is_local:
            self._tried(lambda: self.fs.pipe_file(self.path(name), data))
            return
        self._tried(lambda: self._rename_into(name, lambda path: path.write_bytes(data)))

    def upload(self, path: Path, name: str) -> None:
        if not self.is_local:
            self._tried(lambda: self.fs.put_file(str(path), self.path(name)))
            return
        self._tried(lambda: self._rename_into(name, lambda copy: shutil.copyfile(path, copy)))

    def _rename_into(self, name: str, write: Callable[[Path], Any]) -> None:
        with files.atomic_path(self.path(name)) as temporary:
            write(temporary)

    def names(self, folder: str = "") -> dict[str, int]:
        """Sizes in bytes of the objects directly in a folder, by name; -1 for folders."""
        path = self.path(folder)

        def listed() -> list[dict[str, Any]]:
            self.fs.invalidate_cache(path)
            try:
                return self.fs.ls(path, detail=True)
            except FileNotFoundError:
                return []

        entries = self._tried(listed)
        return {
            entry["name"].rstrip("/").rsplit("/", 1)[-1]: (
                -1 if entry["type"] == "directory" else int(entry.get("size") or 0)
            )
            for entry in entries
            if entry["name"].rstrip("/") != path
        }

    def sizes(self, folder: str) -> dict[str, int]:
        """Sizes in bytes of the objects below a folder, at any depth, by their names in it."""
        path = self.path(folder)

        def found() -> Mapping[str, Mapping[str, Any]]:
            self.fs.invalidate_cache(path)
            return self.fs.find(path, detail=True)

        start = len(path) + 1
        return {
            name[start:]: int(entry.get("size") or 0) for name, entry in self._tried(found).items()
        }

    def delete(self, name: str) -> None:
        """Deletes an object or a folder; one that is gone already is no error."""

        def deleted() -> None:
            try:
                self.fs.rm(self.path(name), recursive=True)
            except FileNotFoundError:
                return

        self._tried(deleted)

    def path(self, name: str) -> str:
        return f"{self.root}/{name}" if name else self.root

    def _tried(self, step: Callable[[], T]) -> T:
        wait_s = FIRST_WAIT_S
        for attempt in range(self.attempts):
            if attempt:
                self.sleep(wait_s * random.uniform(0.5, 1.5))
                wait_s *= 2
            try:
                return step()
            except FileNotFoundError:
                raise
            # Object stores and their libraries raise errors of their own.
            except Exception as error:
                failure = error
        raise self.failure(failure)
