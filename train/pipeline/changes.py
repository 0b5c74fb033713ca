"""Things that a stage is made of: options, the results that it reads, and files elsewhere."""

from __future__ import annotations

import glob
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from draftsmith.files import Signature, plain, signature
from draftsmith.train.data.folders import folders_of
from draftsmith.train.pipeline.kinds import INPUTS
from draftsmith.train.pipeline.stage import SECRETS, Stage, assignments

Made = dict[str, dict[str, Any]]


def made_of(stage: Stage, results: Mapping[str, float]) -> Made:
    """A value that is equal as long as the stage need not be run again. `results` has the time at
    which each earlier stage finished. Files are known by size and change time, models of the Hub
    by their names alone."""
    options = {name: value for name, value in stage.recorded.items() if name not in SECRETS}
    return {
        "options": dict(one.split("=", 1) for one in assignments(options))
        | {"command": " ".join([*stage.launch, stage.command])},
        "stages": {name: results.get(name) for name in stage.needs},
        "files": {
            path: plain(_state(Path(path), INPUTS[option]))
            for option, path in _paths(stage.recorded)
        },
    }


def difference(now: Made, then: Made) -> str | None:
    """The first difference in words; None where there is none."""
    for name in sorted(now["options"].keys() | then["options"].keys()):
        before, after = then["options"].get(name), now["options"].get(name)
        if before != after:
            return f"{name}: {before or 'default'} -> {after or 'default'}"
    for part, words in (("stages", "stage {} ran again"), ("files", "{} changed")):
        for name in sorted(now[part].keys() | then[part].keys()):
            if now[part].get(name) != then[part].get(name):
                return words.format(name)
    return None


def _paths(value: Any, name: str = "") -> Iterator[tuple[str, str]]:
    """(option, path) of files and folders outside the pipeline that options of `INPUTS` name."""
    if isinstance(value, dict):
        for key, item in value.items():
            yield from _paths(item, key)
    elif isinstance(value, list):
        for item in value:
            yield from _paths(item, name)
    elif isinstance(value, str) and name in INPUTS and "${" not in value:
        path = folders_of(value)[0].path if name == "data" else value
        if Path(path).exists():
            yield name, path


def _state(path: Path, pattern: str) -> Signature:
    if path.is_dir():
        return signature(path, pattern)
    return signature(path.parent, glob.escape(path.name))
