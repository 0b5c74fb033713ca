"""Buckets of context length, by which acceptance is counted apart: below 256 tokens, then up to
each power of two. One table for the evaluator and the server."""

from __future__ import annotations

FIRST = 256  # tokens of the first bucket
KILO = 1024


def bucket_of(context: int) -> int:
    """Number of the bucket of a round with `context` tokens before the first that it decides."""
    return (context // FIRST).bit_length()


def bounds_of(bucket: int) -> tuple[int, int]:
    """[begin, end) of a bucket, in tokens."""
    return (FIRST << bucket) // 2 if bucket else 0, FIRST << bucket


def label_of(bucket: int) -> str:
    """`0-256`, `256-512`, `512-1k`, `1k-2k`, ..."""
    return "-".join(_short(bound) for bound in bounds_of(bucket))


def _short(tokens: int) -> str:
    return f"{tokens // KILO}k" if tokens >= KILO else str(tokens)
