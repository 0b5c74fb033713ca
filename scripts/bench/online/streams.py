"""Which domain each request of a stream is from: sudden, gradual, oscillating and recurring shifts,
and all at once. Torch-free."""

from __future__ import annotations

import random
from collections.abc import Sequence

Stream = list[str]


def blocks(*parts: tuple[str, int]) -> Stream:
    """Sudden: so many requests of one domain, then of the next."""
    return [domain for domain, count in parts for _ in range(count)]


def gradual(first: str, second: str, count: int, *, seed: int = 0) -> Stream:
    """The second's share rises evenly from 0 to 1."""
    generator = random.Random(seed)
    return [
        second if generator.random() < (index + 0.5) / count else first for index in range(count)
    ]


def mixed(domains: Sequence[str], count: int, *, seed: int = 0) -> Stream:
    """Each request of any of the domains, all as likely."""
    generator = random.Random(seed)
    return [generator.choice(domains) for _ in range(count)]


def turns(domains: Sequence[str], count: int, times: int) -> Stream:
    """`count` requests of each, the whole `times` times."""
    return blocks(*[(domain, count) for _ in range(times) for domain in domains])
