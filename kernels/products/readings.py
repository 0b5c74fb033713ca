"""Ways in which a compiled kernel reads weights: how far ahead they are asked for, and into which
cache. No sum depends on it; what is fastest is measured, by the number of rows.

Weights are timed as a round finds them, out of all caches: in a ring of memory larger than these.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import cache, partial
from itertools import cycle
from pathlib import Path
from typing import NamedTuple

import torch

from draftsmith.kernels.host_compiler import HEADERS
from draftsmith.kernels.host_memory import empty_in_huge_pages
from draftsmith.kernels.measured import Choices, Way

LINE_BYTES = 64
# Numbers of rows that are timed, each for those up to the next `reading_of` of the source.
ROWS = (1, 4, 8, 32)
# As `Stay` of the source.
STAYS = ("", ", farther", ", past caches")
# A pass over less finds it in the nearest caches.
LEAST_BYTES = 1 << 20
_TIMED_BYTES = 2 << 20  # of weights in a call
_GROUP = 48  # outputs that are laid out together


class WeightReading(NamedTuple):
    ahead: int  # bytes, whole lines
    stay: int

    @property
    def name(self) -> str:
        return f"{self.ahead / 1024:g} KiB ahead{STAYS[self.stay]}"

    @property
    def bits(self) -> int:
        return self.stay | self.ahead // LINE_BYTES << 2


class ReadWeights(NamedTuple):
    """Weights of a product, and the kernel that reads them."""

    shape: Sequence[object]  # but for outputs: what else decides how long a call takes
    outputs: int
    output_bytes: int
    # (rows, address of weights, outputs, readings)
    multiply: Callable[[int, int, int, int], object]
    source: Path


# (KiB ahead, stay); the first is good on most processors.
_WAYS = ((2, 0), (0, 0), (1, 0), (4, 0), (8, 0), (2, 2), (4, 2), (8, 2), (2, 1), (8, 1))
CANDIDATES = [WeightReading(kib << 10, stay) for kib, stay in _WAYS]


def packed(readings: Sequence[WeightReading]) -> int:
    """Readings for each of `ROWS` as the source takes them."""
    return sum(reading.bits << 16 * index for index, reading in enumerate(readings))


@cache
def most_bytes() -> int:
    """Bytes of weights that are gone from all caches when the last of them was read."""
    try:
        size = Path("/sys/devices/system/cpu/cpu0/cache/index3/size").read_text(encoding="ascii")
        last_cache_bytes = int(size.strip().removesuffix("K")) << 10
    except (OSError, ValueError):
        last_cache_bytes = 0
    return min(max(2 * last_cache_bytes, 64 << 20), 256 << 20)


def fastest_readings(weights: ReadWeights, pass_bytes: int, choices: Choices) -> int:
    """Readings of `weights` in passes that read `pass_bytes` of weights in all. A draft's may fit
    in a cache, but the target's pass drives them out."""
    if pass_bytes < LEAST_BYTES:
        return packed([CANDIDATES[0]] * len(ROWS))
    outputs = max(1, min(weights.outputs, _TIMED_BYTES // weights.output_bytes))
    ring_bytes = most_bytes()
    ring = _Ring(ring_bytes, -(-outputs // _GROUP) * _GROUP * weights.output_bytes)
    names, found = {reading.name: reading for reading in CANDIDATES}, []
    for rows in ROWS:
        name = choices.fastest(
            "few rows",
            (*weights.shape, f"{outputs} outputs", f"{rows} rows", f"{ring_bytes >> 20} MiB"),
            list(names),
            partial(_ways, weights, names, rows, outputs, ring),
            sources=[weights.source, *HEADERS],
        )
        found.append(names[name])
    return packed(found)


def _ways(
    weights: ReadWeights, names: Mapping[str, WeightReading], rows: int, outputs: int, ring: _Ring
) -> dict[str, Way]:
    def multiply(readings: int) -> None:
        weights.multiply(rows, ring.next(), outputs, readings)

    return {name: partial(multiply, packed([one] * len(ROWS))) for name, one in names.items()}


class _Ring:
    """Memory for the weights of several layers, made when it is first used."""

    def __init__(self, num_bytes: int, step_bytes: int):
        self._num_bytes, self._step_bytes = num_bytes, step_bytes
        self._memory: torch.Tensor | None = None

    def next(self) -> int:
        """Address of the weights that were not read for longest."""
        if self._memory is None:
            # Zeros are numbers of all types; written, or all pages were one.
            count = max(self._num_bytes // self._step_bytes, 1)
            self._memory = empty_in_huge_pages(count * self._step_bytes, torch.uint8).zero_()
            begin = self._memory.data_ptr()
            self._steps = cycle(range(begin, begin + self._memory.numel(), self._step_bytes))
        return next(self._steps)
