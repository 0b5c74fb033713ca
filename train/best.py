"""The draft of the highest measured tau of a run so far: TRAINING/best.json names its folder. Torch-free.

A folder is whole before the file names it, and the one before goes after that.
"""

from __future__ import annotations

import os
import shutil
from pathlib import Path
from typing import Any, NamedTuple, Protocol

from draftsmith.files import atomic_folder, atomic_path, read_json, write_json


class Saveable(Protocol):
    family: str

    def save(self, folder: Path) -> None: ...


class Kept(NamedTuple):
    """A draft on disk; it is saved elsewhere by copying its files."""

    family: str
    path: Path
    step: int
    tau: float
    evaluation: list[dict[str, Any]]

    def save(self, folder: Path) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        for path in sorted(self.path.iterdir()):
            with atomic_path(folder / path.name) as temporary:
                shutil.copyfile(path, temporary)


class BestDraft:
    """Rank 0 alone uses it."""

    def __init__(self, training: Path):
        self.training = training
        self.record = training / "best.json"

    def offer(self, drafter: Saveable, *, step: int, tau: float, evaluation: list[dict[str, Any]]) -> None:
        """Keeps the draft if none before it was better; of equals the later one, which has seen more."""
        old = self.read()
        if old is not None and (old.tau > tau or old.step == step):
            return
        path = self.training / f"best-{step}"
        with atomic_folder(path) as temporary:
            drafter.save(temporary)
        values = {"family": drafter.family, "folder": path.name, "step": step, "tau": tau, "evaluation": evaluation}
        write_json(self.record, values)
        for other in self.training.glob("best-*"):
            if other != path:
                shutil.rmtree(other)

    def read(self) -> Kept | None:
        if not self.record.is_file():
            return None
        found = read_json(self.record, "record of the best draft")
        path = self.training / found["folder"]
        return Kept(found["family"], path, found["step"], found["tau"], found["evaluation"]) if os.path.isdir(path) else None
