"""Weights of a policy in training as a learner follows them: a folder per revision, and a file that
names the newest.

`draftsmith distill --target ROOT/current` reads the file. A revision is there whole or not at all.
"""

from __future__ import annotations

import re
import shutil
from collections.abc import Callable
from pathlib import Path

from draftsmith.distill.learn.target_source import FILES, WEIGHT_VERSION
from draftsmith.errors import UserError
from draftsmith.files import atomic_folder, sweep, write_text

CURRENT = "current"
FOLDER = re.compile(r"step-\d{6,}")
# A learner may be reading the one before the newest.
FEWEST = 2


class PolicyRevisions:
    """Writer of the revisions below `root`, of which the newest `keep` stay."""

    def __init__(self, root: str | Path, *, keep: int = 3):
        if keep < FEWEST:
            raise UserError(f"keep is {keep}; give {FEWEST} revisions or more")
        self.root, self.keep = Path(root), keep

    @property
    def target(self) -> Path:
        """The file for `--target` of the learner."""
        return self.root / CURRENT

    def write(self, step: int, save: Callable[[Path], object]) -> Path:
        """`save` writes the model into the folder that it is given. Returns the revision's folder,
        which the learner finds from now on.

        Raises:
            UserError: `save` wrote no weights in safetensors.
            OSError: the disk refuses; the revision before stays the newest.
        """
        folder = self.root / f"step-{step:06d}"
        sweep(self.root)
        with atomic_folder(folder) as temporary:
            save(temporary)
            if not any(temporary.glob(FILES)):
                raise UserError(
                    f"the policy of step {step} was saved without a {FILES} file; give a `save` "
                    "that writes safetensors"
                )
            write_text(temporary / WEIGHT_VERSION, f"{step}\n")
        write_text(self.target, f"{folder.name}\n")
        self._prune()
        return folder

    def _prune(self) -> None:
        """Keeps the latest by time of writing, since a training may resume at an earlier step."""
        found = [path for path in self.root.iterdir() if FOLDER.fullmatch(path.name)]
        found.sort(key=lambda path: (path / WEIGHT_VERSION).stat().st_mtime_ns)
        for path in found[: -self.keep]:
            shutil.rmtree(path, ignore_errors=True)
