"""Target that the learner follows: a folder whose weights are replaced while it runs, or a file
that names such a folder."""

from __future__ import annotations

import time
from pathlib import Path

from draftsmith.errors import UserError
from draftsmith.files import Signature, signature

# Beside the weights: the engine's name of them, as records have it.
WEIGHT_VERSION = "weight_version"
FILES = "*.safetensors"
SETTLED_S = 0.2


class TargetFolder:
    """`--target` of a learner.

    Writers replace a folder by one rename, or write a new folder and then its name into the file. A
    copy that is still growing is left alone: files must look alike for `SETTLED_S`.
    """

    def __init__(self, target: str):
        self.target = target
        self.folder = self._folder()
        self.loaded = self.seen = signature(self.folder, FILES)
        self.seen_s = time.monotonic()
        self.weight_version = self._weight_version()

    def _folder(self) -> str:
        """The folder, or the Hub id, that `target` is or names. Raises `UserError` for a file that
        names nothing."""
        path = Path(self.target)
        if not path.is_file():
            return self.target
        named = path.read_text(encoding="utf-8").strip()
        if not named:
            raise UserError(
                f"target {self.target!r} is an empty file; write a folder's name into it"
            )
        return str(path.parent / named)

    def _weight_version(self) -> str:
        path = Path(self.folder) / WEIGHT_VERSION
        return path.read_text(encoding="utf-8").strip() if path.is_file() else ""

    def _look(self) -> Signature:
        try:
            return signature(self._folder(), FILES)
        except (OSError, UserError):
            return []  # in the middle of a replacement

    @property
    def is_new(self) -> bool:
        """True where other weights lie there than were loaded, whole or not."""
        found = self._look()
        return bool(found) and found != self.loaded

    def has_settled(self) -> bool:
        """True where other weights than were loaded lie there and change no more."""
        found, now_s = self._look(), time.monotonic()
        if found != self.seen:
            self.seen, self.seen_s = found, now_s
        return bool(found) and found != self.loaded and now_s - self.seen_s >= SETTLED_S
