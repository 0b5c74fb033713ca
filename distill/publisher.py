"""Versions folder as the learner uses it: the live draft and its parent loaded, candidates
published, regressions undone."""

from __future__ import annotations

import logging
from collections.abc import Iterable, Iterator, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

import torch

from draftsmith.drafters import checkpoint, versions
from draftsmith.drafters.interface import TrainedDrafter
from draftsmith.drafters.target.target import Target
from draftsmith.errors import UserError

logger = logging.getLogger("draftsmith.distill")


class Publisher:
    """Live draft and its ancestors of one versions folder.

    `live` is the draft that servers run, or will after their next look; `parent` is the nearest
    version before it that is whole and made for this target. The floor is the first such version:
    the static draft, where that is whole and for this target, too.
    """

    def __init__(self, root: str | Path, draft: str, target: Target):
        self.root, self.target = Path(root), target
        if not self._is_begun():
            self._publish_first(draft)
        try:
            self.reload()
        except UserError as error:
            if self._has_whole_version():
                raise
            logger.warning("%s; none is whole, so the starting draft is published again", error)
            self._publish_first(draft)
            self.reload()

    def _is_begun(self) -> bool:
        """True also where `current` cannot be read: there were versions before."""
        try:
            return versions.latest(self.root) is not None
        except UserError:
            return True

    def _has_whole_version(self) -> bool:
        for version in versions.versions(self.root):
            with suppress(UserError):
                versions.open_version(self.root, version)
                return True
        return False

    def reload(self) -> None:
        """Loads the version that `current` names now."""
        self.version, self.live = self._open_live()
        self.parent_version, self.parent = self.open_first(self._ancestors())

    def load(self, folder: str | Path) -> TrainedDrafter:
        """Loads a draft in float32, as candidates are trained: rounding must not decide a
        comparison."""
        return checkpoint.load(folder, self.target, dtype=torch.float32)

    def _publish_first(self, draft: str) -> None:
        """Publishes the starting draft, so that there is always a version to go back to."""
        drafter = self.load(draft)
        record = Path(draft) / checkpoint.RECORD
        made = checkpoint.read_metadata(draft) if record.is_file() else {}

        def save(folder: Path) -> None:
            checkpoint.save(
                drafter,
                folder,
                self.target,
                training=made.get("training"),
                evaluation=made.get("evaluation"),
            )

        versions.publish(
            self.root,
            save,
            family=drafter.family,
            target=checkpoint.identity(self.target),
            parent=None,
            data_range={},
            gate={"reason": "the starting draft", "draft": str(draft)},
        )

    def _open_live(self) -> tuple[int, TrainedDrafter]:
        """Opens the current version, or the newest intact one below it if that one is damaged."""
        opened = versions.open_live(self.root, self.load)
        if opened is None:
            raise UserError(
                f"{str(self.root / versions.CURRENT)!r} is gone; write the number of a good "
                "version into it"
            )
        if opened.damage is not None:
            versions.rollback(self.root, opened.version, str(opened.damage))
            logger.warning("%s; rolled back to version %d", opened.damage, opened.version)
        return opened.version, opened.draft

    def open_floor(self) -> tuple[int | None, TrainedDrafter | None]:
        """Opens the floor; (None, None) where the parent is the floor, or the live version
        itself."""
        bound = self.version if self.parent_version is None else self.parent_version
        return self.open_first(version for version in self.own_versions() if version < bound)

    def own_versions(self) -> Iterator[int]:
        """Versions that were made for this target, ascending."""
        for version in versions.versions(self.root):
            try:
                stranger = versions.stranger(self.root, version, self.target.revision)
            except UserError:
                continue
            if not stranger:
                yield version

    def open_first(self, some: Iterable[int]) -> tuple[int | None, TrainedDrafter | None]:
        """Loads the first of the versions that is whole and for this target."""
        for version in some:
            try:
                stranger = versions.stranger(self.root, version, self.target.revision)
                if not stranger:
                    return version, self.load(versions.open_version(self.root, version))
                reason = f"it was made for target revision {stranger}"
            except UserError as error:
                reason = str(error)
            logger.warning(
                "version %d cannot be rolled back to version %d: %s", self.version, version, reason
            )
        return None, None

    def _ancestors(self) -> Iterator[int]:
        """Ancestors of the live version, each below the one before, so that no chain is endless.
        The chain ends, too, where a manifest is gone."""
        version = self.version
        while True:
            try:
                parent = versions.read_manifest(self.root, version)["parent"]
            except UserError:
                return
            if parent is None or parent >= version:
                return
            yield parent
            version = parent

    def publish(
        self,
        candidate: TrainedDrafter,
        *,
        training: Mapping[str, Any],
        data_range: Mapping[str, Any],
        gate: Mapping[str, Any],
    ) -> int:
        """Publishes a candidate. It is read back from its files before it is visible: what goes
        live is what was written."""
        loaded: list[TrainedDrafter] = []

        def save(folder: Path) -> None:
            checkpoint.save(candidate, folder, self.target, training=dict(training))
            loaded.append(self.load(folder))

        self.version = versions.publish(
            self.root,
            save,
            family=candidate.family,
            target=checkpoint.identity(self.target),
            parent=self.version,
            data_range=data_range,
            gate=gate,
        )
        self.live = loaded[0]
        self.parent_version, self.parent = self.open_first(self._ancestors())
        return self.version

    def roll_back(self, version: int) -> bool:
        """Makes `version` live. False where it is not whole any more; `parent` is then another one,
        or none. The caller logs the reason."""
        try:
            versions.promote(self.root, version)
        except UserError as error:
            logger.warning("%s", error)
            self.parent_version, self.parent = self.open_first(self._ancestors())
            return False
        self.reload()
        return True
