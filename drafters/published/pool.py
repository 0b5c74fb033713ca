"""`VERSIONS/pool/`: drafts that serve one class of requests each. Torch-free.

`pool.json` names the classes that servers draft for with a draft of their own, and the versions
folder of each beside it: `{"classes": {"code": "c01"}, "learning": {"prose": "c02"}, "clusters":
null}`. `learning` is the learner's alone; `clusters` sorts requests without a tag
(`prompt_clusters.py`). The folder of a class that lost its draft keeps its decisions, so that no
folder ever means two classes.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from draftsmith import files
from draftsmith.drafters.published.prompt_clusters import PromptClusters
from draftsmith.drafters.published.versions import CURRENT
from draftsmith.errors import UserError

POOL = "pool"
POOL_FILE = "pool.json"
FOLDER = re.compile(r"c(\d{2,})")
KEYS = {"classes", "learning", "clusters"}


@dataclass(frozen=True)
class DraftPool:
    # class -> name of its versions folder under `pool/`
    classes: Mapping[str, str] = field(default_factory=dict)
    # likewise; servers do not draft with it yet
    learning: Mapping[str, str] = field(default_factory=dict)
    clusters: PromptClusters | None = None

    def class_of(self, request_class: str, prompt: Sequence[int]) -> str:
        """The given tag, else the cluster of the prompt's tokens, else ""."""
        if request_class or self.clusters is None:
            return request_class
        return self.clusters.nearest(prompt)


def pool_root(root: str | Path) -> Path:
    return Path(root) / POOL


def next_folder(root: str | Path) -> str:
    """A name that no class ever had. A folder without a live version is one that a full disk kept
    from being begun."""
    begun = [entry.parent.name for entry in pool_root(root).glob(f"c*/{CURRENT}")]
    taken = [int(match[1]) for name in begun if (match := FOLDER.fullmatch(name))]
    return f"c{max(taken, default=0) + 1:02d}"


def read_pool(root: str | Path) -> DraftPool | None:
    """Read the pool; None without one."""
    path = pool_root(root) / POOL_FILE
    if not path.is_file():
        return None
    value = files.read_json(path, "the pool file")
    if not (
        set(value) == KEYS and _are_folders(value["classes"]) and _are_folders(value["learning"])
    ):
        raise UserError(
            f"{str(path)!r} holds {str(value)[:60]!r} instead of "
            '{"classes": {"code": "c01"}, "learning": {}, "clusters": null}; mend or delete it'
        )
    clusters = None if value["clusters"] is None else PromptClusters.from_dict(value["clusters"])
    return DraftPool(value["classes"], value["learning"], clusters)


def write_pool(root: str | Path, pool: DraftPool) -> None:
    clusters = None if pool.clusters is None else pool.clusters.to_dict()
    values = {"classes": dict(pool.classes), "learning": dict(pool.learning), "clusters": clusters}
    files.write_json(pool_root(root) / POOL_FILE, values)


def _are_folders(value: object) -> bool:
    return isinstance(value, dict) and all(
        name and isinstance(at, str) and FOLDER.fullmatch(at) for name, at in value.items()
    )
