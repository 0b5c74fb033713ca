"""The versions folder as the learner uses it: the live draft and its parent loaded, candidates published, regressions undone."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch

from draftsmith.drafters import checkpoint, versions
from draftsmith.drafters.interface import TrainedDrafter
from draftsmith.drafters.target import Target
from draftsmith.errors import UserError

logger = logging.getLogger("draftsmith.distill")


class Publisher:
    """`live` is what servers run, or will after their next look; `parent` is what a rollback returns to: the nearest version
    before it that is whole and made for this target."""

    def __init__(self, root: str | Path, draft: str, target: Target):
        self.root, self.target = Path(root), target
        if versions.latest(self.root) is None:
            self._publish_first(draft)
        self.reload()

    def reload(self) -> None:
        """Whatever `current` names now."""
        self.version, self.live = self._open_live()
        self.parent_version, self.parent = self._open_parent()

    def load(self, folder: str | Path) -> TrainedDrafter:
        """In float32, as candidates are trained: rounding must not decide a comparison."""
        return checkpoint.load(folder, self.target, dtype=torch.float32)

    def _publish_first(self, draft: str) -> None:
        """The starting draft becomes a version too, so that there is always one to go back to."""
        drafter = self.load(draft)
        record = Path(draft) / checkpoint.RECORD
        made = checkpoint.read_metadata(draft) if record.is_file() else {}

        def save(folder: Path) -> None:
            checkpoint.save(drafter, folder, self.target, training=made.get("training"), evaluation=made.get("evaluation"))

        self._publish(drafter, save, parent=None, data_range={}, gate={"reason": "the starting draft", "draft": str(draft)})

    def _publish(
        self,
        drafter: TrainedDrafter,
        save: Callable[[Path], None],
        *,
        parent: int | None,
        data_range: Mapping[str, Any],
        gate: Mapping[str, Any],
        live: bool = True,
    ) -> int:
        return versions.publish(
            self.root,
            save,
            family=drafter.family,
            target=checkpoint.identity(self.target),
            parent=parent,
            data_range=data_range,
            gate=gate,
            live=live,
        )

    def _open_live(self) -> tuple[int, TrainedDrafter]:
        """The current version, or the newest intact one below it if that one is damaged."""
        current = versions.latest(self.root)
        if current is None:
            raise UserError(f"{str(self.root / versions.CURRENT)!r} is gone; write the number of a good version into it")
        try:
            return current, self.load(versions.open_version(self.root, current))
        except UserError as error:
            damage = error
        for version in reversed([one for one in versions.versions(self.root) if one < current]):
            try:
                drafter = self.load(versions.open_version(self.root, version))
            except UserError as error:
                logger.warning("%s", error)
                continue
            versions.rollback(self.root, version, str(damage))
            logger.warning("%s; rolled back to version %d", damage, version)
            return version, drafter
        raise damage

    def _open_parent(self) -> tuple[int | None, TrainedDrafter | None]:
        parent = self._parent_of(self.version)
        while parent is not None:
            try:
                stranger = versions.stranger(self.root, parent, self.target.revision)
                if not stranger:
                    return parent, self.load(versions.open_version(self.root, parent))
                reason = f"it was made for target revision {stranger}"
            except UserError as error:
                reason = str(error)
            logger.warning("version %d cannot be rolled back to version %d: %s", self.version, parent, reason)
            parent = self._parent_of(parent)
        return None, None

    def _parent_of(self, version: int) -> int | None:
        """Below it, so that no chain is endless; None too where the manifest is gone."""
        try:
            parent = versions.read_manifest(self.root, version)["parent"]
        except UserError:
            return None
        return parent if parent is not None and parent < version else None

    def publish(
        self,
        candidate: TrainedDrafter,
        *,
        training: Mapping[str, Any],
        data_range: Mapping[str, Any],
        gate: Mapping[str, Any],
        live: bool = True,
    ) -> int:
        """The candidate is read back from its files before it can be seen: what goes live is what was written. Unless `live`, it
        is a version like any other that no server looks at yet."""
        loaded: list[TrainedDrafter] = []

        def save(folder: Path) -> None:
            checkpoint.save(candidate, folder, self.target, training=dict(training))
            loaded.append(self.load(folder))

        version = self._publish(candidate, save, parent=self.version, data_range=data_range, gate=gate, live=live)
        if live:
            self.version, self.live = version, loaded[0]
            self.parent_version, self.parent = self._open_parent()
        return version

    def promote(self, version: int) -> None:
        versions.promote(self.root, version)
        self.reload()

    def roll_back(self, reason: str) -> bool:
        """False where the parent that this was decided by is gone meanwhile; `parent` is then another one, or none."""
        compared = self.parent_version
        self.parent_version, self.parent = self._open_parent()
        if compared is None or self.parent_version != compared:
            return False
        versions.rollback(self.root, compared, reason)
        self.reload()
        return True
