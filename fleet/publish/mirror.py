"""Mirror of the learner's versions folder: what it makes live goes to the store, with the engine
layouts, and becomes the store's `current`, or the candidate of a rollout.

Only changes of the learner's `current` are followed: an operator's promotion or rollback of the
fleet holds until the learner's next one. `publisher.json` of the store remembers how far it went.
A live version whose files are damaged is reported once: engines keep what they serve, and a store
without a live version gets the newest whole one before it.
"""

from __future__ import annotations

import json
import logging
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Protocol

from draftsmith.drafters.published import versions
from draftsmith.errors import UserError
from draftsmith.fleet.publish.retention import prune
from draftsmith.fleet.publish.upload import upload
from draftsmith.fleet.store.errors import StoreError
from draftsmith.fleet.store.layout import parse_json
from draftsmith.fleet.store.store import VersionStore

logger = logging.getLogger("draftsmith.fleet")

MIRRORED = "publisher.json"


class Damaged(UserError):
    """A versions folder none of whose versions is whole, until the learner's next one."""


class Promotion(Protocol):
    """Receiver of versions that the learner made live and the store has. False while it takes
    none, such as during a rollout: the version that is live later is offered again."""

    def __call__(self, version: int) -> bool: ...


class MirrorWriter(Protocol):
    """Writer of engine layouts; `LayoutWriter`, or another in tests."""

    @property
    def layouts(self) -> tuple[str, ...]: ...

    def write(self, folder: Path) -> Mapping[str, Path]: ...

    def clear(self, folder: Path) -> None: ...


class Mirror:
    """One publisher of one folder; its caller holds the folder's publisher lock.

    Args:
        promote: called for each new live version, again after a kill; by default it becomes
            `current`.
        keep: newest versions that stay in the store, beside those in use.
    """

    def __init__(
        self,
        root: str | Path,
        store: VersionStore,
        writer: MirrorWriter,
        *,
        promote: Promotion | None = None,
        keep: int = 20,
        event: Callable[[str], None] = logger.info,
    ):
        self.root, self.store, self.writer = Path(root), store, writer
        self.promote, self.keep, self.event = promote or self.make_current, keep, event
        self.damage = ""  # of the live version, until it is mended or another one is live

    def step(self) -> bool:
        """Publishes what became live since the last step; False where nothing did.

        Raises `StoreError`, `OSError` or `Damaged` for what another step may get over, and another
        `UserError` for what it cannot."""
        found = self._to_publish()
        if found is None:
            return False
        live, folder = found
        self._put(live, folder)
        self._upload_parent(live)
        # Until it is done, so that a kill after the promotion is never taken for the state before.
        self.remember(None)
        if not self.promote(live):
            return False
        self.remember(live)
        for version in prune(self.store, self.root, keep=self.keep):
            self.event(f"version {version} is deleted from the store")
        return True

    def make_current(self, version: int) -> bool:
        self.store.put_current(version)
        self.event(f"version {version} is live for all engines")
        return True

    def _to_publish(self) -> tuple[int, Path] | None:
        """The learner's live version and its folder, where it is another one than the last."""
        try:
            live = versions.latest(self.root)
            if live is None or live == self.mirrored():
                self.damage = ""
                return None
            folder = versions.open_version(self.root, live)
        except UserError as error:
            return self._in_place_of(error)
        self.damage = ""
        return live, folder

    def _in_place_of(self, damage: UserError) -> tuple[int, Path] | None:
        is_new, self.damage = str(damage) != self.damage, str(damage)
        if self.store.current_or_none() is not None:
            if is_new:
                self.event(f"{damage}; engines keep what they serve until the learner's next one")
            return None
        try:
            opened = versions.open_live(self.root, lambda folder: folder)
        except UserError as error:
            raise Damaged(f"{error}; no version before it is whole") from error
        assert opened is not None  # there is a `current`, whatever it names
        if is_new:
            self.event(f"{damage}; version {opened.version} is published in its place")
        return opened.version, opened.draft

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
            data = self.store.objects.read(MIRRORED)
        except FileNotFoundError:
            return None
        try:
            return parse_json(data, MIRRORED).get("mirrored")
        except StoreError:
            return None

    def remember(self, version: int | None) -> None:
        self.store.objects.put(
            MIRRORED, json.dumps({"mirrored": version, "time_s": time.time()}).encode()
        )
