"""One version in a store: all files, a look at their sizes, then the manifest."""

from __future__ import annotations

import json
from collections.abc import Callable, Collection, Mapping
from pathlib import Path
from typing import Any

from draftsmith.errors import UserError
from draftsmith.files import plain
from draftsmith.fleet.store.cache import sha256_of
from draftsmith.fleet.store.errors import StoreError, StoreUnreachable
from draftsmith.fleet.store.layout import MANIFEST, FileMark, file_marks, folder_of
from draftsmith.fleet.store.store import VersionStore


def upload(
    store: VersionStore,
    version: int,
    folder: Path,
    own: Mapping[str, Any],
    layouts: Collection[str],
    write_layouts: Callable[[Path], Mapping[str, Path]],
) -> bool:
    """Puts the version in `folder`, whose manifest is `own`, into the store; False where it is
    there already. A kill leaves files without a manifest, which no reader takes for a version and
    another call writes again.

    Raises:
        UserError: the store has another version of this number.
    """
    found = found_in(store, version, own)
    present = found.get("layouts", ())
    if found and set(layouts) <= set(present):
        return False
    files = {name: path for name, path in files_in(folder).items() if name != MANIFEST}
    for layout, place in write_layouts(folder).items():
        files |= {f"{layout}/{name}": path for name, path in files_in(place).items()}
    marks = {name: FileMark(path.stat().st_size, sha256_of(path)) for name, path in files.items()}
    for name, path in files.items():
        store.put_file(version, name, path)
    # Layouts that engines read already stay.
    marks = file_marks(found) | marks
    check_sizes(store, version, marks)
    manifest = {
        **own,
        "layouts": sorted({*present, *layouts}),
        "files": {name: mark._asdict() for name, mark in marks.items()},
    }
    store.put_manifest(version, (json.dumps(plain(manifest), indent=2) + "\n").encode())
    return True


def found_in(store: VersionStore, version: int, own: Mapping[str, Any]) -> Mapping[str, Any]:
    """Manifest of the same version in the store; empty where it is not there whole."""
    try:
        found = store.manifest(version)
    except StoreUnreachable:
        raise
    except StoreError:
        return {}
    digests = {name: mark.sha256 for name, mark in file_marks(found).items()}
    if any(digests.get(name) != digest for name, digest in own["hashes"].items()):
        raise UserError(
            f"version {version} in {store.url!r} is another one than the learner's; give a store "
            "of its own to each versions folder"
        )
    return found


def check_sizes(store: VersionStore, version: int, marks: Mapping[str, FileMark]) -> None:
    """An upload that the store took and cut is noticed here rather than by every engine."""
    sizes = store.sizes(version)
    for name, mark in marks.items():
        if sizes.get(name) != mark.bytes:
            raise StoreUnreachable(
                f"{folder_of(version)}/{name} has {sizes.get(name, 0)} bytes in {store.url!r} "
                f"instead of {mark.bytes}; it is uploaded again"
            )


def files_in(folder: Path) -> dict[str, Path]:
    paths = sorted(path for path in folder.rglob("*") if path.is_file())
    return {path.relative_to(folder).as_posix(): path for path in paths}
