"""Kinds of requests found in traffic without tags: spherical k-means over hashed token counts
(`drafters/pool.py`).

Counts of a short text are mostly chance, so that its vector is first projected onto the few
directions in which the traffic differs most (latent semantic analysis); centroids are given back
over buckets, where servers use them.

How many kinds there are is what two halves of the traffic agree on. Each half is sorted by its own
centroids and by those of the other; the prediction strength (Tibshirani and Walther) is the share
of the pairs that its own centroids put together which the other's do as well, in the worst of its
clusters. Clusters that only one half shows are none.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from draftsmith.drafters.pool import PromptClusters, counts, unit

BUCKETS = 1024
DIRECTIONS = 8
# Texts of one kind agree in 1 / k of their pairs. The published 0.8 is for clusters that do not
# overlap; those of short texts do.
STRENGTH = 0.65
SPLITS = 4
RESTARTS = 10  # three let a single start decide whether kinds were found
MOST_ITERATIONS = 30


def find_clusters(texts: Sequence[Sequence[int]], *, most: int, seed: int) -> PromptClusters | None:
    """Clusters, at most `most`; None where the texts are of one kind. The same texts and seed give
    the same clusters."""
    damped = np.log1p(
        np.array([counts(text, BUCKETS) for text in texts], dtype=np.float64).reshape(-1, BUCKETS)
    )
    weights = np.log((1 + len(texts)) / (1 + (damped > 0).sum(axis=0)))
    directions = np.linalg.svd(unit(damped * weights), full_matrices=False)[2][:DIRECTIONS]
    rows = unit(damped * weights @ directions.T)
    generator = np.random.default_rng(seed)
    number = max(
        (k for k in range(2, most + 1) if strength(rows, k, generator) >= STRENGTH), default=1
    )
    return (
        PromptClusters(weights, centroids(rows, number, generator) @ directions)
        if number > 1
        else None
    )


def strength(rows: np.ndarray, k: int, generator: np.random.Generator) -> float:
    """Mean over splits and both directions; 0 where a half is too small for k clusters of two."""
    if len(rows) < 4 * k:
        return 0.0
    found = []
    for _ in range(SPLITS):
        order = generator.permutation(len(rows))
        halves = rows[order[::2]], rows[order[1::2]]
        own = [centroids(half, k, generator) for half in halves]
        found += [agreement(half, own[at], own[1 - at]) for at, half in enumerate(halves)]
    return float(np.mean(found))


def agreement(rows: np.ndarray, own: np.ndarray, other: np.ndarray) -> float:
    """Share of the pairs that `own` puts together which `other` does too, in the worst cluster of
    two or more."""
    mine, theirs = assign(rows, own), assign(rows, other)
    shares = []
    for cluster in range(len(own)):
        sizes = np.bincount(theirs[mine == cluster])
        if (total := int(sizes.sum())) < 2:
            return 0.0
        shares.append(float((sizes * (sizes - 1)).sum() / (total * (total - 1))))
    return min(shares)


def assign(rows: np.ndarray, centres: np.ndarray) -> np.ndarray:
    """Index [n] of the most similar centre of each row."""
    return (rows @ centres.T).argmax(axis=1)


def centroids(rows: np.ndarray, k: int, generator: np.random.Generator) -> np.ndarray:
    """Centroids [k, buckets] of length 1: the best of a few restarts, by the mean similarity of
    rows to theirs."""
    found = [lloyd(rows, first_centres(rows, k, generator)) for _ in range(RESTARTS)]
    return max(found, key=lambda centres: float((rows @ centres.T).max(axis=1).mean()))


def lloyd(rows: np.ndarray, centres: np.ndarray) -> np.ndarray:
    """Lloyd's algorithm. A cluster that loses all its rows keeps its centre."""
    sorted_into = np.full(len(rows), -1)
    for _ in range(MOST_ITERATIONS):
        nearest = assign(rows, centres)
        if (nearest == sorted_into).all():
            break
        sorted_into = nearest
        sums = np.zeros_like(centres)
        np.add.at(sums, nearest, rows)
        centres = np.where((sums != 0).any(axis=1, keepdims=True), unit(sums), centres)
    return centres


def first_centres(rows: np.ndarray, k: int, generator: np.random.Generator) -> np.ndarray:
    """Rows far from each other (k-means++)."""
    chosen = [int(generator.integers(len(rows)))]
    for _ in range(k - 1):
        distance = np.clip(1 - (rows @ rows[chosen].T).max(axis=1), 0.0, None)
        total = float(distance.sum())
        distribution = distance / total if total > 0 else np.full(len(rows), 1 / len(rows))
        chosen.append(int(generator.choice(len(rows), p=distribution)))
    return rows[chosen]
