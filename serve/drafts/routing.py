"""Choice of the draft that drafts a request, made once, when it comes in, before anything is drawn.
Torch-free.

Drafts have names: `LIVE`, `CANARY` (a version on trial) and `class_draft(NAME)`, the draft of a
class of requests.
"""

from __future__ import annotations

import hashlib
import math
from collections import deque
from collections.abc import Collection, Sequence
from dataclasses import dataclass, field

from draftsmith.drafters.published.pool import DraftPool
from draftsmith.drafters.published.versions import in_canary
from draftsmith.serve.requests.route import CANARY, LIVE, Route, class_draft

WINDOW = 64  # latest requests that a draft is measured by
FEWEST = 12  # of these, before they count
CERTAIN = 3.0  # standard errors
# of a class's requests are drafted by the other of its two drafts, so that both stay known
PROBES = 0.1


@dataclass
class MeasuredDraft:
    """Share of the reached drafted tokens that was kept, per request."""

    shares: deque[float] = field(default_factory=lambda: deque(maxlen=WINDOW))

    @property
    def mean(self) -> float:
        return sum(self.shares) / len(self.shares)

    @property
    def squared_error(self) -> float:
        """Squared standard error of the mean. Tokens of one request are alike, so requests are
        counted."""
        mean, count = self.mean, len(self.shares)
        return sum((share - mean) ** 2 for share in self.shares) / (count * (count - 1))


class Router:
    """Routes by the pool and the trial. `EngineLoop.set_routing` sets `canary_share` and `pool`
    from other threads; the rest belongs to the engine's.

    A class's draft drafts its class until it is measured to be worse there than the live one, and
    again once it is not. Requests left for the live draft take part in the trial of a version,
    whatever the reason: the trial compares like with like.
    """

    def __init__(self) -> None:
        self.canary_share = 0.0
        self.pool = DraftPool()
        self._measured: dict[Route, MeasuredDraft] = {}

    def choose(
        self, request: str, request_class: str, prompt: Sequence[int], ready: Collection[str]
    ) -> Route:
        """Route of a request.

        Args:
            request: its name in records, by which their readers find the requests on trial.
            ready: drafts that take requests.
        """
        pool = self.pool
        name = pool.class_of(request_class, prompt) if pool.classes else ""
        if name not in pool.classes:
            name = ""
        elif class_draft(name) in ready and self.prefers(name) != is_probe(request):
            return Route(class_draft(name), name)
        canary = CANARY in ready and in_canary(request, self.canary_share)
        return Route(CANARY if canary else LIVE, name)

    def observe(self, route: Route, reached: int, kept: int) -> None:
        """Count a finished request: `reached` drafted tokens whose prefix was kept, of which `kept`
        were kept."""
        if route.pool_class and reached > 0:
            self._measured.setdefault(route, MeasuredDraft()).shares.append(kept / reached)

    def prefers(self, name: str) -> bool:
        """True unless the class's own draft is measured to be worse there than the live one."""
        own, live = (self._measured.get(Route(draft, name)) for draft in (class_draft(name), LIVE))
        if own is None or live is None or min(len(own.shares), len(live.shares)) < FEWEST:
            return True
        return own.mean + CERTAIN * math.sqrt(own.squared_error + live.squared_error) >= live.mean

    def forget(self, draft: str) -> None:
        """Drop the measurements of a draft that has other weights now, or is gone."""
        self._measured = {
            route: measured for route, measured in self._measured.items() if route.draft != draft
        }


def is_probe(request: str) -> bool:
    digest = hashlib.blake2b(request.encode(), digest_size=6, person=b"probe").digest()
    return int.from_bytes(digest, "big") < PROBES * 2**48
