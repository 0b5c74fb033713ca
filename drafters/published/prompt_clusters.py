"""Clusters of prompts for requests without a tag: nearest of a few centroids of hashed token
counts. Torch-free.

A prompt is the unit vector of its token counts, hashed into buckets, damped by a logarithm and
weighted by how rare a bucket is.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from draftsmith.errors import UserError

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
