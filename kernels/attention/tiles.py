"""Sizes of the Triton kernel's tiles, so that they fit into registers and shared memory."""

from __future__ import annotations

from functools import lru_cache
from typing import NamedTuple

import torch

from draftsmith.errors import UserError
from draftsmith.kernels.dispatch import pins

# Queries of a tile (tokens times grouped heads): tensor cores need 16 at least, registers hold
# results for no more than 64, and no more than so many numbers of all of them.
_FEWEST_QUERIES, _MOST_QUERIES = 16, 64
_MOST_RESULTS = 16384
# Keys of a step.
_FEWEST_KEYS, _MOST_KEYS = 16, 64
# Three steps of keys and values take no more, so that two programs share a multiprocessor.
_STEPS_BYTES = 160 * 1024
# What the compiler takes beyond queries, keys and values: weights between layouts, barriers.
_EXTRA_BYTES = 8 * 1024


class DeviceLimits(NamedTuple):
    num_multiprocessors: int
    shared_bytes: int  # that a program may have at most


class Widths(NamedTuple):
    """Powers of two that hold the dimensions of a head; `rest` is 0 where `key` holds all."""

    key: int
    rest: int
    value: int

    @property
    def keys(self) -> int:
        return self.key + self.rest

    @classmethod
    def of(cls, key_dim: int, value_dim: int) -> Widths:
        key = max(16, next_power_of_2(key_dim))
        half = key // 2
        rest = max(16, next_power_of_2(key_dim - half))
        split = half >= 16 and half + rest < key
        return cls(*((half, rest) if split else (key, 0)), max(16, next_power_of_2(value_dim)))


class Tiles(NamedTuple):
    """Sizes of a launch."""

    tokens: int  # of a tile
    parts: int  # into which the heads that share a kv head are divided
    queries: int  # of a tile, a power of two: tokens times the heads of a part, padded
    keys: int  # of a step
    num_warps: int


class HeadKind(NamedTuple):
    """Heads of a layer and the pass, which the sizes of a launch depend on."""

    groups: int  # query heads that share a kv head
    widths: Widths
    element_size: int  # bytes of a number
    has_bits: bool  # trees in a window: a position to work out for every score


def choose_tiles(kind: HeadKind, average_tokens: int, shared_bytes: int) -> Tiles:
    """As many queries as a row of `average_tokens` has use for, and as registers and
    `shared_bytes` of shared memory allow. Raises a `UserError` where nothing fits."""
    most = min(_MOST_QUERIES, _MOST_RESULTS // kind.widths.value)
    if kind.element_size > 2:  # no tensor core multiplies these: operands lie in registers too
        most //= 2
    wanted = next_power_of_2(kind.groups * average_tokens)
    queries = max(_FEWEST_QUERIES, min(wanted, most))
    while queries >= _FEWEST_QUERIES:
        keys = _most_keys(kind, queries)
        while keys >= _FEWEST_KEYS:
            if _shared_bytes(kind, queries, keys) <= shared_bytes:
                return _tiles(kind, queries, keys)
            keys //= 2
        queries //= 2
    least = _shared_bytes(kind, _FEWEST_QUERIES, _FEWEST_KEYS)
    raise UserError(
        f"attention with heads of {kind.widths.keys} and {kind.widths.value} numbers of"
        f" {kind.element_size} bytes needs {least} bytes of shared memory, this device has"
        f" {shared_bytes}; use a smaller dtype or another device"
    )


def _tiles(kind: HeadKind, queries: int, keys: int) -> Tiles:
    parts = -(-kind.groups // queries)
    few = queries <= 32 and queries * kind.widths.value < _MOST_RESULTS
    warps = 4 if few and kind.element_size <= 2 else 8
    return Tiles(queries // -(-kind.groups // parts), parts, queries, keys, warps)


def _most_keys(kind: HeadKind, queries: int) -> int:
    """Number of keys of a step that registers hold."""
    if kind.element_size > 2:
        return _FEWEST_KEYS
    width = kind.widths.keys + kind.widths.value
    fitting = _STEPS_BYTES // (3 * width * kind.element_size)
    keys = max(_FEWEST_KEYS, min(_MOST_KEYS, 1 << max(fitting, 1).bit_length() - 1))
    return min(keys, _MOST_KEYS // 2) if kind.has_bits and queries > 32 else keys


def _shared_bytes(kind: HeadKind, queries: int, keys: int) -> int:
    """At least what the compiled kernel takes: a step is worked on while the next one arrives.
    Values of four bytes need no second buffer."""
    widths, size = kind.widths, kind.element_size
    of_values = widths.value * (1 if size > 2 else 2)
    return (queries * widths.keys + keys * (2 * widths.keys + of_values)) * size + _EXTRA_BYTES


def next_power_of_2(number: int) -> int:
    return 1 << max(number - 1, 0).bit_length()


@lru_cache(maxsize=16)
def limits_of(device: torch.device) -> DeviceLimits:
    if not pins(device):
        return DeviceLimits(1, 227 * 1024)
    properties = torch.cuda.get_device_properties(device)
    return DeviceLimits(properties.multi_processor_count, properties.shared_memory_per_block_optin)
