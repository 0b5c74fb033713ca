"""Which domain each request of a stream is from. Torch-free."""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Mapping
from typing import NamedTuple

# The draft was trained on answers to the first.
FIRST, SECOND, THIRD = "code", "prose", "headers"
WINDOWS, WINDOW_S = 72, 600.0
# From which window of ten minutes on which domains are asked for, and how much each.
DAY: Mapping[int, dict[str, float]] = {
    0: {FIRST: 1.0},
    18: {SECOND: 1.0},
    36: {SECOND: 0.5, THIRD: 0.5},
    48: {FIRST: 1.0},
    60: {FIRST: 1 / 3, SECOND: 1 / 3, THIRD: 1 / 3},
}


class Stream(NamedTuple):
    """Domains in the order of the requests; where one window ends and the next begins.

    Args:
        window_s: simulated seconds of a window; None: the machine's clock.
        shifts: windows in which the traffic changes at once.
    """

    domains: list[str]
    ends: list[int]
    window_s: float | None = None
    shifts: frozenset[int] = frozenset()


def blocks(*parts: tuple[str, float]) -> list[str]:
    """So many requests of one domain, then of the next."""
    return [domain for domain, count in parts for _ in range(max(8, round(count)))]


def gradual(first: str, second: str, count: int, *, seed: int = 0) -> list[str]:
    """The second's share rises evenly from 0 to 1."""
    draws = random.Random(seed)
    return [second if draws.random() < (at + 0.5) / count else first for at in range(count)]


def turns(domains: tuple[str, ...], count: float, times: int) -> list[str]:
    """`count` requests of each, the whole `times` times."""
    return blocks(*[(domain, count) for _ in range(times) for domain in domains])


def by_number(domains: list[str], *, window: int = 50) -> Stream:
    return Stream(domains, [*range(window, len(domains), window), len(domains)])


def day(requests: int) -> Stream:
    """Twelve hours: a morning, a noon and an evening, between a quarter of the busiest ten minutes
    and all of them."""
    domains: list[str] = []
    ends = []
    for number in range(WINDOWS):
        load = 0.625 - 0.375 * math.cos(2 * math.pi * number / WINDOWS)
        shares = DAY[max(begin for begin in DAY if begin <= number)]
        count = max(1, round(load * requests / 20))
        draws = random.Random(f"0 {number}")
        domains += draws.choices(list(shares), weights=list(shares.values()), k=count)
        ends.append(len(domains))
    return Stream(domains, ends, WINDOW_S, frozenset(DAY) - {0})


# By the requests after a sudden shift; everything else is a share of them.
STREAMS: dict[str, Callable[[int], Stream]] = {
    "sudden": lambda n: by_number(blocks((FIRST, n / 10), (SECOND, n))),
    "gradual": lambda n: by_number(gradual(FIRST, SECOND, max(8, round(0.3 * n)))),
    "oscillating": lambda n: by_number(turns((FIRST, SECOND), n / 40, 6)),
    "recurring": lambda n: by_number(turns((FIRST, SECOND, THIRD), n / 20, 2)),
    "returning": lambda n: by_number(
        blocks((FIRST, n / 10), (SECOND, 5 * n / 12), (FIRST, n / 5), (SECOND, n / 5))
    ),
    "day": day,
}
