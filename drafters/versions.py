"""Published drafts on disk: `VERSIONS/v000007/` folders, `current` naming the live one,
`decisions.jsonl`. Torch-free.

One process publishes, any number read. A version is there whole or not at all: its folder appears
by one rename, and readers look only at the version named by `current`, which is replaced
afterwards. A kill at any point therefore leaves the last version readable; a folder that never
became current is ignored and its number is not used again.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import time
from collections.abc import Callable, Collection, Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Generic, TypeVar

from draftsmith import files
from draftsmith.errors import UserError

SCHEMA_VERSION = 1
MANIFEST = "manifest.json"
CURRENT = "current"
DECISIONS = "decisions.jsonl"
FOLDER = re.compile(r"v(\d{6,})")

Draft = TypeVar("Draft")


def folder_of(root: str | Path, version: int) -> Path:
    return Path(root) / f"v{version:06d}"


def versions(root: str | Path) -> list[int]:
    """Every version with a manifest, ascending; live or not."""
    root = Path(root)
    if not root.is_dir():
        return []
    found = [FOLDER.fullmatch(entry.name) for entry in root.iterdir()]
    return sorted(int(one[1]) for one in found if one and (root / one[0] / MANIFEST).is_file())


def latest(root: str | Path) -> int | None:
    """The version that servers should run (not the highest one after a rollback); None before the
    first."""
    path = Path(root) / CURRENT
    try:
        text = path.read_text(encoding="utf-8", errors="replace").strip()
    except FileNotFoundError:
        return None
    if not (text.isascii() and text.isdigit()):
        raise UserError(
            f"{str(path)!r} holds {text[:40]!r} instead of a version number; write the number of "
            "a good version into it"
        )
    return int(text)


def publish(
    root: str | Path,
    save: Callable[[Path], None],
    *,
    family: str,
    target: Mapping[str, Any],
    parent: int | None,
    data_range: Mapping[str, Any],
    gate: Mapping[str, Any],
) -> int:
    """`save` writes the draft checkpoint into the folder it is given. Returns the new version,
    which is then the live one.

    `parent` is the version the draft was trained from, `data_range` the records it learned from,
    `gate` the numbers that earned its promotion. The caller holds the folder's lock: publishing has
    one writer.
    """
    root = Path(root)
    root.mkdir(parents=True, exist_ok=True)
    files.sweep(root)
    version = _next_version(root)
    with files.atomic_folder(folder_of(root, version)) as temporary:
        save(temporary)
        manifest = {
            "schema": SCHEMA_VERSION,
            "version": version,
            "parent": parent,
            "family": family,
            "target": target,
            "data_range": data_range,
            "gate": gate,
            "hashes": _hashes(temporary),
            "created_s": time.time(),
        }
        files.write_json(temporary / MANIFEST, files.plain(manifest))
    _make_live(root, version)
    return version


def promote(root: str | Path, version: int) -> None:
    """Makes an intact version that is there already the live one."""
    open_version(root, version)
    _make_live(Path(root), version)


def _make_live(root: Path, version: int) -> None:
    files.write_text(root / CURRENT, f"{version}\n")


def read_manifest(root: str | Path, version: int) -> dict[str, Any]:
    manifest = files.read_json(
        folder_of(root, version) / MANIFEST, f"manifest of version {version}"
    )
    is_whole = (
        manifest.get("schema") == SCHEMA_VERSION
        and {"version", "parent"} <= manifest.keys()
        and all(isinstance(manifest.get(name), dict) for name in ("target", "data_range", "hashes"))
    )
    if not is_whole:
        raise UserError(
            f"version {version} in {str(root)!r} has no manifest of schema {SCHEMA_VERSION}; "
            "publish it again"
        )
    return manifest


def stranger(root: str | Path, version: int, revision: str) -> str:
    """The revision of the target that the version was made for, where it is another one than
    `revision`; else ""."""
    made_for = str(read_manifest(root, version)["target"].get("revision", ""))
    return "" if made_for == revision else made_for


def open_version(root: str | Path, version: int) -> Path:
    """The folder of a version whose files are what was published, byte for byte."""
    folder = folder_of(root, version)
    manifest = read_manifest(root, version)
    for name, digest in manifest["hashes"].items():
        path = folder / name
        if not path.is_file():
            raise UserError(
                f"version {version} lacks {str(path)!r}; restore the file or roll back to another "
                "version"
            )
        if files.sha256_of(path) != digest:
            raise UserError(
                f"version {version} is corrupt: {str(path)!r} is not what was published; roll "
                "back to another version"
            )
    return folder


@dataclass(frozen=True)
class OpenedVersion(Generic[Draft]):
    """A version and its draft. `damage` is the error of the live version, where that could not be
    loaded and this is an earlier one."""

    version: int
    draft: Draft
    damage: UserError | None = None


def open_live(root: str | Path, load: Callable[[Path], Draft]) -> OpenedVersion[Draft] | None:
    """Loads the live version, or the newest one before it that can be loaded; None before the
    first. Raises the live one's error where none can."""
    try:
        live = latest(root)
    except UserError as error:
        damage, earlier = error, versions(root)
    else:
        if live is None:
            return None
        try:
            return OpenedVersion(live, load(open_version(root, live)))
        except UserError as error:
            damage, earlier = error, [one for one in versions(root) if one < live]
    for version in reversed(earlier):
        with suppress(UserError):
            return OpenedVersion(version, load(open_version(root, version)), damage)
    raise damage


def rollback(root: str | Path, version: int, reason: str) -> None:
    """Makes an older, intact version the live one again and logs why. The log has null as the
    version that was left where `current` could not be read."""
    left = None
    with suppress(UserError):
        left = latest(root)
    promote(root, version)
    record_decision(
        root, {"decision": "rolled back", "version": version, "left": left, "reason": reason}
    )


def prune(root: str | Path, *, keep: int, needed: Collection[int | None] = ()) -> list[int]:
    """Deletes all but the newest `keep` versions, the live one, its parent, the first and what is
    `needed`; returns those."""
    present = versions(root)
    live = latest(root)
    kept = {*present[:1], *present[-keep:], *needed} if keep > 0 else set(present)
    if live in present:
        kept |= {live, read_manifest(root, live)["parent"]}
    doomed = [version for version in present if version not in kept]
    for version in doomed:
        folder = folder_of(root, version)
        hidden = folder.with_name(f".{folder.name}.00000000.old")
        os.replace(folder, hidden)
        shutil.rmtree(hidden, ignore_errors=True)
    return doomed


def record_decision(root: str | Path, decision: Mapping[str, Any]) -> None:
    """Appends one synced JSON line. A line torn by an earlier kill is closed first, so it spoils
    only itself."""
    path = Path(root) / DECISIONS
    path.parent.mkdir(parents=True, exist_ok=True)
    line = json.dumps(files.plain({"time_s": time.time(), **decision}), ensure_ascii=True) + "\n"
    with open(path, "ab+") as handle:
        size = handle.seek(0, os.SEEK_END)
        if size:
            handle.seek(size - 1)
            line = line if handle.read(1) == b"\n" else "\n" + line
        handle.write(line.encode())
        handle.flush()
        os.fsync(handle.fileno())


def read_decisions(root: str | Path, last: int | None = None) -> list[dict[str, Any]]:
    """Every whole line, oldest first; with `last` no more than so many, without parsing others."""
    path = Path(root) / DECISIONS
    if not path.is_file():
        return []
    decisions = []
    lines = path.read_text(encoding="utf-8", errors="replace").split("\n")
    for line in lines if last is None else lines[-last - 1 :]:  # the final one is no whole line
        try:
            decision = json.loads(line)
        except json.JSONDecodeError:
            continue
        if isinstance(decision, dict):
            decisions.append(decision)
    return decisions


def _next_version(root: Path) -> int:
    """One more than any folder, whole or broken, and than `current`: a number never means two
    things."""
    taken = [int(match[1]) for entry in root.iterdir() if (match := FOLDER.fullmatch(entry.name))]
    with suppress(UserError):  # a file that holds no number takes none
        taken.append(latest(root) or 0)
    return max(taken, default=0) + 1


def _hashes(folder: Path) -> dict[str, str]:
    return {name: files.sha256_of(path) for name, path in files.files_in(folder).items()}
