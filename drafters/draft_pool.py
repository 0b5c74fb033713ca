"""`VERSIONS/pool/`: drafts that serve one class of requests each. Torch-free.

`pool.json` names the classes that servers draft for with a draft of their own, and the versions folder of each beside it:
`{"classes": {"code": "c01"}, "clusters": null}`. `clusters` sorts requests without a tag (`prompt_clusters.py`).
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from draftsmith import files
from draftsmith.drafters.prompt_clusters import PromptClusters
from draftsmith.errors import UserError

POOL = "pool"
POOL_FILE = "pool.json"
FOLDER = re.compile(r"c(\d{2,})")


@dataclass(frozen=True)
class DraftPool:
    classes: Mapping[str, str] = field(default_factory=dict)  # class -> name of its versions folder under `pool/`
    clusters: PromptClusters | None = None

    def class_of(self, request_class: str, prompt: Sequence[int]) -> str:
        """The given tag, else the cluster of the prompt's tokens, else ""."""
        if request_class or self.clusters is None:
            return request_class
        return self.clusters.nearest(prompt)


def pool_root(root: str | Path) -> Path:
    return Path(root) / POOL


def folder_name(number: int) -> str:
    return f"c{number:02d}"


def read_pool(root: str | Path) -> DraftPool | None:
    """None when there is no pool."""
    path = pool_root(root) / POOL_FILE
    if not path.is_file():
        return None
    value = files.read_json(path, "the pool file")
    if not isinstance(value, dict) or set(value) != {"classes", "clusters"} or not _are_classes(value["classes"]):
        raise UserError(
            f"{str(path)!r} holds {str(value)[:60]!r} instead of "
            '{"classes": {"code": "c01"}, "clusters": null}; mend or delete it'
        )
    clusters = None if value["clusters"] is None else PromptClusters.from_dict(value["clusters"])
    return DraftPool(value["classes"], clusters)


def write_pool(root: str | Path, pool: DraftPool) -> None:
    clusters = None if pool.clusters is None else pool.clusters.to_dict()
    files.write_json(pool_root(root) / POOL_FILE, {"classes": dict(pool.classes), "clusters": clusters})


def _are_classes(value: object) -> bool:
    return isinstance(value, dict) and all(name and isinstance(at, str) and FOLDER.fullmatch(at) for name, at in value.items())
