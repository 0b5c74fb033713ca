"""Record of a pipeline, `run.json` in its folder: stages that were begun, and those that finished.
One process at a time writes it."""

from __future__ import annotations

from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from draftsmith.errors import UserError
from draftsmith.files import read_json, write_json
from draftsmith.train.pipeline.changes import Made

SCHEMA_VERSION = 1


@dataclass
class StageRecord:
    made_of: Made
    begun: int = 0  # starts of the stage, those after a kill included
    seconds: float = 0.0  # of starts that came to an end
    finished: float | None = None  # time.time()
    status: int | None = None  # exit status of the last start; None while it runs, and after a kill


@dataclass
class Record:
    path: Path
    stages: dict[str, StageRecord] = field(default_factory=dict)

    @classmethod
    def read(cls, out: Path) -> Record:
        path = out / "run.json"
        if not path.is_file():
            return cls(path)
        values = read_json(path, "record of the pipeline")
        if values.get("schema") != SCHEMA_VERSION:
            raise UserError(
                f"record {str(path)!r} is of schema {values.get('schema')!r} and this version "
                f"reads {SCHEMA_VERSION}; give another --out"
            )
        return cls(path, {name: StageRecord(**one) for name, one in values["stages"].items()})

    def write(self) -> None:
        values: dict[str, Any] = {name: asdict(one) for name, one in self.stages.items()}
        write_json(self.path, {"schema": SCHEMA_VERSION, "stages": values})

    def finished(self) -> dict[str, float]:
        """Time at which each finished stage did so."""
        return {name: one.finished for name, one in self.stages.items() if one.finished is not None}
