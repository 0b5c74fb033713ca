"""`VERSIONS/pool/`: drafts that serve one class of requests each. Torch-free.

`pool.json` names the classes that servers draft for with a draft of their own, and the versions
folder of each beside it: `{"classes": {"code": "c01"}, "learning": {"prose": "c02"}, "clusters":
null}`. `learning` is the learner's alone; `clusters` sorts requests without a tag.
The folder of a class that lost its draft keeps its decisions, so that no folder ever means two
classes.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from draftsmith import files
from draftsmith.drafters.versions import CURRENT
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


# Knuth's multiplier: neighbouring ids, which a tokenizer's merges make alike, come into unrelated
# buckets.
SPREAD = 2654435761
CLUSTER_NAME = re.compile(r"\(cluster \d+\)")


@dataclass(frozen=True, eq=False)
class PromptClusters:
    weights: np.ndarray  # [buckets] of a bucket's damped count, larger where few prompts have it
    centroids: np.ndarray  # [clusters, buckets], each of length 1

    def nearest(self, prompt: Sequence[int]) -> str:
        """The name of the cluster, "" for a prompt that shares nothing with any."""
        likeness = self.centroids @ vector(prompt, self.weights)
        return cluster_name(int(likeness.argmax())) if float(likeness.max()) > 0 else ""

    def to_dict(self) -> dict[str, Any]:
        """Four digits are far more than decide between centroids."""
        return {
            "weights": _rounded(self.weights),
            "centroids": [_rounded(row) for row in self.centroids],
        }

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> PromptClusters:
        try:
            weights, centroids = (
                np.array(values[name], dtype=np.float64) for name in ("weights", "centroids")
            )
        except (KeyError, TypeError, ValueError) as error:
            raise UserError(
                f"the clusters of the pool file cannot be read ({error}); delete the file"
            ) from error
        is_shaped = (
            weights.ndim == 1
            and centroids.ndim == 2
            and centroids.shape[1] == len(weights) > 0
            and len(centroids) > 0
        )
        if not is_shaped or not np.isfinite(weights).all() or not np.isfinite(centroids).all():
            raise UserError(
                f"the clusters of the pool file have {weights.shape} weights and "
                f"{centroids.shape} centroids, which do not fit "
                "each other or are not finite; delete the file"
            )
        return cls(weights, centroids)


def cluster_name(number: int) -> str:
    return f"(cluster {number + 1})"


def is_cluster_name(name: str) -> bool:
    """True for a client's tag that would be taken for a cluster."""
    return CLUSTER_NAME.fullmatch(name) is not None


def counts(prompt: Sequence[int], buckets: int) -> np.ndarray:
    """[buckets] how often each bucket's tokens occur."""
    ids = np.asarray(prompt, dtype=np.int64)
    # The high bits of the product are the mixed ones.
    return np.bincount((ids * SPREAD % 2**32 >> 16) % buckets, minlength=buckets)


def vector(prompt: Sequence[int], weights: np.ndarray) -> np.ndarray:
    """[buckets], of length 1; zero for an empty prompt."""
    return unit(np.log1p(counts(prompt, len(weights))) * weights)


def unit(rows: np.ndarray) -> np.ndarray:
    """Along the last axis."""
    length = np.linalg.norm(rows, axis=-1, keepdims=True)
    return rows / np.where(length > 0, length, 1.0)


def _rounded(values: np.ndarray) -> list[float]:
    return [round(float(value), 4) for value in values]
