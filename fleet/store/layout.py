"""Names of the objects of a store, and the two that say what is there: `current` and a version's
manifest.

    current                     number of the live version and a line's end, put last
    engines/ID.json             status of one engine
    v000007/manifest.json       size and sha256 of every other file of the version, put last
    v000007/...                 the checkpoint, as `draftsmith distill` publishes it
    v000007/vllm/...            the same draft in an engine's layout
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, fields
from pathlib import PurePosixPath
from typing import Any, NamedTuple
from urllib.parse import quote

from draftsmith.drafters.versions import CURRENT, SCHEMA_VERSION
from draftsmith.files import plain, restored

ENGINES = "engines"


class FileMark(NamedTuple):
    """Size and digest of a file."""

    bytes: int
    sha256: str


def folder_of(version: int) -> str:
    return f"v{version:06d}"


def current_bytes(version: int) -> bytes:
    return f"{version}\n".encode()


def parse_current(data: bytes) -> int:
    # The line's end shows that the number is whole, also where a put is not atomic.
    match = re.fullmatch(rb"(\d{1,12})\s*\n", data)
    if match is None:
        raise StoreError(
            f"{CURRENT!r} of the store holds {data[:40]!r} instead of a version number and a "
            "line's end; promote a good version"
        )
    return int(match[1])


def parse_json(data: bytes, what: str) -> dict[str, Any]:
    try:
        value = json.loads(data)
    except ValueError as error:
        raise StoreError(f"{what} is not valid JSON ({error}); write it again") from error
    if not isinstance(value, dict):
        raise StoreError(f"{what} holds {str(value)[:40]!r} instead of an object; write it again")
    return value


def parse_manifest(data: bytes, version: int) -> dict[str, Any]:
    manifest = parse_json(data, f"the manifest of version {version}")
    if manifest.get("schema") != SCHEMA_VERSION or manifest.get("version") != version:
        raise StoreError(
            f"the manifest of version {version} is of version {manifest.get('version')!r}, schema "
            f"{manifest.get('schema')!r}; publish it again"
        )
    if not file_marks(manifest):
        raise StoreError(f"the manifest of version {version} lists no files; publish it again")
    return manifest


def file_marks(manifest: Mapping[str, Any]) -> dict[str, FileMark]:
    """Size and digest by name, of all files of a version. Raises `StoreError` for a name that
    leaves the version's folder, or a mark of another form."""
    files = manifest.get("files") or {}
    try:
        found = {
            str(name): FileMark(int(mark["bytes"]), str(mark["sha256"]))
            for name, mark in files.items()
        }
    except (AttributeError, KeyError, TypeError, ValueError) as error:
        raise StoreError(
            f"the manifest of version {manifest.get('version')} lists its files in another form "
            f"({error!r}); publish it again"
        ) from error
    for name in found:
        path = PurePosixPath(name)
        if path.is_absolute() or ".." in path.parts or str(path) != name or "\\" in name:
            raise StoreError(
                f"version {manifest.get('version')} names {name!r}, which lies outside its folder; "
                "publish it again"
            )
    return found


def files_of(manifest: Mapping[str, Any], layout: str) -> dict[str, FileMark]:
    """Files of one layout, by their names in it; the checkpoint itself for ""."""
    layouts = [str(one) for one in manifest.get("layouts") or ()]
    if layout and layout not in layouts:
        raise StoreError(
            f"version {manifest['version']} has no layout {layout!r} (it has "
            f"{', '.join(layouts) or 'none'}); publish it with --layouts {layout}"
        )
    marks = file_marks(manifest)
    if layout:
        prefix = f"{layout}/"
        return {
            name[len(prefix) :]: mark for name, mark in marks.items() if name.startswith(prefix)
        }
    return {name: mark for name, mark in marks.items() if name.split("/")[0] not in layouts}


class StoreError(Exception):
    """A version, status or file of the store that is refused: another try reads the same."""


class StoreUnreachable(StoreError):
    """A store that does not answer: a later try may succeed, so that what is served stays."""


@dataclass(frozen=True, kw_only=True)
class EngineStatus:
    engine: str
    version: int | None = None  # what it drafts with; None for a draft that is no version
    since_s: float = 0.0  # when it began to, in seconds since 1970
    alpha: float | None = None  # accepted of the drafted tokens reached, of that version
    tau: float | None = None
    tokens_per_s: float | None = None
    z: float | None = None  # of the losslessness monitor
    alarm: bool = False  # its evidence against a lossless engine is enough
    refused: dict[int, str] = field(default_factory=dict)  # reason by version
    # {"version": ..., "pause_ms": ..., "ok": ...}
    last_swap: Mapping[str, Any] = field(default_factory=dict)
    at_s: float = 0.0  # when this status was made

    def to_json(self) -> bytes:
        return (json.dumps(plain(asdict(self))) + "\n").encode()


def parse_status(data: bytes) -> EngineStatus:
    """Keys that are not known are left out: engines of a fleet are upgraded one by one."""
    values = parse_json(data, "the status of an engine")
    known = {one.name for one in fields(EngineStatus)}
    try:
        read = {name: value for name, value in values.items() if name in known}
        read["at_s"] = float(read.get("at_s") or 0.0)
        return restored(EngineStatus, read)
    except (AttributeError, TypeError, ValueError) as error:
        raise StoreError(
            f"the status of engine {values.get('engine')!r} is of another form ({error})"
        ) from error


def object_of(engine: str) -> str:
    """Name of an engine's status. Ids are often HOST:PORT."""
    return f"{ENGINES}/{quote(engine, safe=':@+=')}.json"
