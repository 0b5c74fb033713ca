"""`draftsmith fleet publish`, a mirror of the learner's versions folder: what it makes live goes to
the store, with the engine layouts, and becomes the store's `current`.

Only changes of the learner's `current` are followed: an operator's promotion or rollback of the
fleet holds until the learner's next one. `publisher.json` of the store remembers how far it went.
A live version whose files are damaged is reported once: engines keep what they serve.
"""

from __future__ import annotations

import contextlib
import io
import json
import logging
import shutil
import threading
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from pathlib import Path
from typing import Any

from draftsmith.drafters import versions
from draftsmith.errors import UserError
from draftsmith.files import files_in, plain, sha256_of, sweep
from draftsmith.fleet.config import FleetConfig
from draftsmith.fleet.store.layout import (
    FileMark,
    StoreError,
    StoreUnreachable,
    file_marks,
    folder_of,
    parse_json,
)
from draftsmith.fleet.store.store import VersionStore
from draftsmith.lock import folder_lock, stopping
from draftsmith.progress import loading

logger = logging.getLogger("draftsmith.fleet")
MIRRORED = "publisher.json"
# Engines whose status is older are gone; until then their version stays.
GONE_S = 86400.0


class Mirror:
    """One publisher of one folder; its caller holds the folder's publisher lock.

    Args:
        keep: newest versions that stay in the store, beside those in use.
    """

    def __init__(
        self,
        root: str | Path,
        store: VersionStore,
        writer: LayoutWriter,
        *,
        keep: int = 20,
        event: Callable[[str], None] = logger.info,
    ):
        self.root, self.store, self.writer = Path(root), store, writer
        self.keep, self.event = keep, event
        self.damage = ""  # of the live version, until it is mended or another one is live
        self.is_its_store = False  # not looked at yet

    def step(self) -> bool:
        """Publishes what became live since the last step; False where nothing did.

        Raises `StoreError` or `OSError` for what another step may get over, and `UserError` for
        what it cannot."""
        if not self.is_its_store:
            self._refuse_others()
        found = self._to_publish()
        if found is None:
            return False
        live, folder = found
        self._put(live, folder)
        self._upload_parent(live)
        # Until it is done, so that a kill after the promotion is never taken for the state before.
        self.remember(None)
        self.store.put_current(live)
        self.event(f"version {live} is live for all engines")
        self.remember(live)
        for version in prune(self.store, self.root, keep=self.keep):
            self.event(f"version {version} is deleted from the store")
        return True

    def _refuse_others(self) -> None:
        """Raises where the store has versions of another folder: whose numbers are here, too."""
        for version in {*versions.versions(self.root)} & {*self.store.versions()}:
            try:
                own = versions.read_manifest(self.root, version)
            except UserError:  # said where the version is needed
                continue
            found_in(self.store, version, own)
        self.is_its_store = True

    def _to_publish(self) -> tuple[int, Path] | None:
        """The learner's live version and its folder, where it is another one than the last."""
        try:
            live = versions.latest(self.root)
            if live is None or live == self.mirrored():
                self.damage = ""
                return None
            folder = versions.open_version(self.root, live)
        except UserError as error:
            if str(error) != self.damage:
                self.damage = str(error)
                self.event(f"{error}; engines keep what they serve until the learner's next one")
            return None
        self.damage = ""
        return live, folder

    def upload(self, version: int) -> None:
        self._put(version, versions.open_version(self.root, version))

    def _put(self, version: int, folder: Path) -> None:
        own = versions.read_manifest(self.root, version)
        begun_s = time.monotonic()
        writer = self.writer
        if upload(self.store, version, folder, own, writer.layouts, writer.write):
            took_s = time.monotonic() - begun_s
            self.event(f"version {version} is in the store after {took_s:.1f} s")
        self.writer.clear(folder)

    def _upload_parent(self, live: int) -> None:
        """A rollback goes to the parent, which the store may lack: it was live for a moment, or
        before this store. One that is damaged is no reason to hold the live one back."""
        try:
            parent = versions.read_manifest(self.root, live)["parent"]
            if parent is not None:
                self.upload(parent)
        except UserError as error:
            self.event(f"{error}; version {live} is published without its parent")

    def mirrored(self) -> int | None:
        """The learner's live version that was followed last; None in the midst of a change."""
        try:
            data = self.store.read(MIRRORED)
        except FileNotFoundError:
            return None
        try:
            return parse_json(data, MIRRORED).get("mirrored")
        except StoreError:
            return None

    def remember(self, version: int | None) -> None:
        self.store.put(MIRRORED, json.dumps({"mirrored": version, "time_s": time.time()}).encode())


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
    files = {name: path for name, path in files_in(folder).items() if name != versions.MANIFEST}
    for layout, place in write_layouts(folder).items():
        files |= {f"{layout}/{name}": path for name, path in files_in(place).items()}
    marks = {name: FileMark(path.stat().st_size, sha256_of(path)) for name, path in files.items()}
    for name, path in files.items():
        store.upload(path, f"{folder_of(version)}/{name}")
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
    found = manifest_in(store, version)
    digests = {name: mark.sha256 for name, mark in file_marks(found).items()}
    if found and any(digests.get(name) != digest for name, digest in own["hashes"].items()):
        raise UserError(
            f"version {version} in {store.url!r} is another one than the learner's; give a store "
            "of its own to each versions folder"
        )
    return found


def check_sizes(store: VersionStore, version: int, marks: Mapping[str, FileMark]) -> None:
    """An upload that the store took and cut is noticed here rather than by every engine."""
    sizes = store.sizes(folder_of(version))
    for name, mark in marks.items():
        if sizes.get(name) != mark.bytes:
            raise StoreUnreachable(
                f"{folder_of(version)}/{name} has {sizes.get(name, 0)} bytes in {store.url!r} "
                f"instead of {mark.bytes}; it is uploaded again"
            )


def prune(store: VersionStore, root: Path, *, keep: int) -> list[int]:
    """Deletes all versions but the newest `keep`, the live one and its parent, and those that
    engines serve; also folders without a manifest that the learner will not fill any more. Returns
    the deleted versions.

    The caller is the only writer, and uploads nothing meanwhile.
    """
    if keep <= 0:
        return []
    present = store.versions()
    used = in_use(store)
    old = set(present[:-keep])
    torn = {
        version for version in present if version not in used and not manifest_in(store, version)
    } - set(versions.versions(root))
    doomed = sorted((old | torn) - used)
    for version in doomed:
        store.delete_version(version)
    return doomed


def in_use(store: VersionStore) -> set[int]:
    used: set[int | None] = set()
    live = store.current()
    if live is not None:
        used |= {live, store.manifest(live).get("parent")}
    for engine in store.engines():
        if time.time() - engine.at_s < GONE_S:
            used.add(engine.version)
    return {version for version in used if version is not None}


def manifest_in(store: VersionStore, version: int) -> Mapping[str, Any]:
    """Manifest of a version; empty where it is not there whole."""
    try:
        return store.manifest(version)
    except StoreUnreachable:
        raise
    except StoreError:
        return {}


# Beside the versions: a folder that is no version, so that no server and no learner looks into it.
WORK = "fleet"


class LayoutWriter:
    """Writer of engine layouts below `ROOT/fleet`, each whole or absent. What a kill left whole is
    used again.

    Args:
        target: folder or Hub id; by default the one that the draft names.
    """

    def __init__(
        self,
        root: Path,
        layouts: Sequence[str],
        *,
        target: str | None = None,
        trust_remote_code: bool = False,
    ):
        self.work, self.layouts = root / WORK, tuple(layouts)
        self.target, self.trust_remote_code = target, trust_remote_code

    def write(self, folder: Path) -> dict[str, Path]:
        """Folder by layout of the version in `folder`."""
        written = {}
        for layout in self.layouts:
            out = self.work / folder.name / layout
            if not out.is_dir():
                sweep(out.parent)
                self._export(folder, layout, out)
            written[layout] = out
        return written

    def _export(self, folder: Path, layout: str, out: Path) -> None:
        with loading():  # not before the first layout
            from draftsmith.train.config import ExportConfig
            from draftsmith.train.export.command import open_source, run
            from draftsmith.train.export.serving import VLLM_SPECULATORS
            from draftsmith.train.export.table import WRITERS

        config = ExportConfig(
            draft=str(folder),
            to=layout,
            out=str(out),
            target=self.target,
            trust_remote_code=self.trust_remote_code,
        )
        source = open_source(config)
        if source.is_stitched:
            raise UserError(
                f"a draft in layout {layout!r} that is a part of its target's checkpoint cannot be "
                f"swapped while serving; publish {str(folder)!r} without --layouts {layout}"
            )
        is_written = layout in WRITERS.get(source.family, {})
        if layout == "speculators" and is_written and source.family not in VLLM_SPECULATORS:
            raise UserError(
                f"{str(folder)!r} is a draft of family {source.family!r}, which engines cannot "
                f"read in layout {layout!r}; publish it with --layouts vllm"
            )
        out.parent.mkdir(parents=True, exist_ok=True)
        with contextlib.redirect_stdout(io.StringIO()):  # its lines are for a person at a terminal
            run(config)

    def clear(self, folder: Path) -> None:
        shutil.rmtree(self.work / folder.name, ignore_errors=True)


def run(config: FleetConfig, stop: threading.Event | None = None) -> int:
    if config.to is None:
        raise UserError("fleet publish needs the address that engines read; give --to")
    root, stop = Path(config.versions), stop or threading.Event()
    if config.once and not root.is_dir():
        raise UserError(
            f"versions folder {config.versions!r} does not exist; start draftsmith distill first"
        )
    writer = LayoutWriter(
        root, config.layouts, target=config.target, trust_remote_code=config.trust_remote_code
    )
    mirror = Mirror(root, VersionStore(config.to), writer, keep=config.keep, event=say)
    with stopping(stop):
        await_learner(root, config, stop)
        if not stop.is_set():
            with folder_lock(root, "publisher", option="versions"):
                say(f"what {config.versions!r} makes live goes to {config.to!r}")
                loop(mirror.step, config, stop)
    if config.once and mirror.damage:
        raise UserError(mirror.damage)
    return 0


def await_learner(root: Path, config: FleetConfig, stop: threading.Event) -> None:
    """A learner that was started with the publisher makes its folder when it has loaded."""
    if not root.is_dir():
        say(f"waiting for versions folder {config.versions!r}, which draftsmith distill makes")
    while not root.is_dir() and not stop.wait(config.poll_s):
        pass


def loop(step: Callable[[], object], config: FleetConfig, stop: threading.Event) -> None:
    """Steps until `stop`. An error that a later step may get over is reported once in a row."""
    failure = ""
    while not stop.is_set():
        try:
            step()
            failure = ""
        except (StoreError, OSError) as error:
            if config.once:
                raise
            if str(error) != failure:
                failure = str(error)
                say(f"{failure}; trying again")
        if config.once:
            return
        stop.wait(config.poll_s)


def say(text: str) -> None:
    print(f"fleet: {text}", flush=True)
