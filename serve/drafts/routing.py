"""Which of several drafts a request is drafted with. Chosen once, when it comes in, before anything
is drawn. Torch-free.

Drafts have names: `LIVE`, `CANARY` (a version on trial) and `class_draft(NAME)`, the draft of a
class of requests.
"""

from __future__ import annotations

import hashlib
import math
from collections import deque
from collections.abc import Collection, Sequence
from dataclasses import dataclass, field

from draftsmith.drafters.published.canary import in_canary
from draftsmith.drafters.published.pool import DraftPool
from draftsmith.serve.requests.route import CANARY, LIVE, Route, class_draft

WINDOW = 64  # latest requests that a draft is judged by
FEWEST = 12  # of these, before it is
CERTAIN = 3.0  # standard errors
# of a class's requests are drafted by the other of its two drafts, so that both stay known
PROBES = 0.1


@dataclass
class Measured:
    """What share of the drafted tokens that were reached was kept, request by request."""

    shares: deque[float] = field(default_factory=lambda: deque(maxlen=WINDOW))

    @property
    def mean(self) -> float:
        return sum(self.shares) / len(self.shares)

    @property
    def squared_error(self) -> float:
        """Of the mean. Tokens of one request are alike, so that requests are what is counted."""
        mean, count = self.mean, len(self.shares)
        return sum((share - mean) ** 2 for share in self.shares) / (count * (count - 1))


class Router:
    """Whoever follows the versions folder sets `canary_share` and `pool` from its own thread; the
    rest is the engine's.

    A class's draft drafts its class until it is measured to be worse there than the live one, and
    again once it is not. Who is left for the live draft takes part in the trial of a version,
    whatever the reason: the trial compares like with like.
    """

    def __init__(self) -> None:
        self.canary_share = 0.0
        self.pool = DraftPool()
        self._measured: dict[Route, Measured] = {}

    def choose(
        self, request: str, request_class: str, prompt: Sequence[int], ready: Collection[str]
    ) -> Route:
        """`request` as records name it, so that whoever reads them knows who was in a trial;
        `ready` are the drafts that take requests."""
        pool = self.pool
        name = pool.class_of(request_class, prompt) if pool.classes else ""
        if name not in pool.classes:
            name = ""
        elif class_draft(name) in ready and self.prefers(name) != is_probe(request):
            return Route(class_draft(name), name)
        canary = CANARY in ready and in_canary(request, self.canary_share)
        return Route(CANARY if canary else LIVE, name)

    def heard(self, route: Route, reached: int, kept: int) -> None:
        """The end of a request: `reached` drafted tokens whose prefix was kept, and how many of
        them were kept."""
        if route.pool_class and reached > 0:
            self._measured.setdefault(route, Measured()).shares.append(kept / reached)

    def prefers(self, name: str) -> bool:
        """Whether the class is better off with its own draft, as far as is known."""
        own, live = (self._measured.get(Route(draft, name)) for draft in (class_draft(name), LIVE))
        if own is None or live is None or min(len(own.shares), len(live.shares)) < FEWEST:
            return True
        return own.mean + CERTAIN * math.sqrt(own.squared_error + live.squared_error) >= live.mean

    def forget(self, draft: str) -> None:
        """It has other weights now, or is gone."""
        self._measured = {
            route: measured for route, measured in self._measured.items() if route.draft != draft
        }


def is_probe(request: str) -> bool:
    digest = hashlib.blake2b(request.encode(), digest_size=6, person=b"probe").digest()
    return int.from_bytes(digest, "big") < PROBES * 2**48
