"""Drafts that an engine serves: their loading, swapping and retiring, and the draft of each
request, chosen once, when it comes in, before anything is drawn.

Drafts have names: `LIVE`, `CANARY` (a version on trial) and `class_draft(NAME)`, the draft of a
class of requests. `prepare` may run on any thread; all else runs on the engine's, between two
rounds.
"""

from __future__ import annotations

import logging
import math
from collections import deque
from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import dataclass, field

import torch

from draftsmith.drafters.interface import ServingDrafter
from draftsmith.drafters.pool import DraftPool
from draftsmith.drafters.target.target import Target
from draftsmith.drafters.versions import in_canary
from draftsmith.errors import UserError
from draftsmith.prompts.shares import uniform
from draftsmith.record import hashed
from draftsmith.serve.drafts.served import ServedDraft
from draftsmith.serve.drafts.swap import Swap, apply_swap, prepare_new, prepare_swap
from draftsmith.serve.requests.request import CANARY, LIVE, Request, Route, class_draft
from draftsmith.serve.stats import EngineStats

log = logging.getLogger(__name__)
WINDOW = 64  # latest requests that a draft is measured by
FEWEST = 12  # of these, before they count
CERTAIN = 3.0  # standard errors
# of a class's requests are drafted by the other of its two drafts, so that both stay known
PROBES = 0.1


class DraftSet:
    """Drafts by name: the live one and, beside it, further ones of its family and shape.

    Args:
        drafter: of the live draft; None: no speculation.
        make_ready: prepares a further draft for serving as the first one was, on any thread.
        requests: all requests that have not ended.
    """

    def __init__(
        self,
        drafter: ServingDrafter | None,
        target: Target,
        stats: EngineStats,
        *,
        make_ready: Callable[[ServingDrafter], None],
        requests: Callable[[], Iterable[Request]],
    ):
        self.target, self.stats = target, stats
        self._make_ready, self._requests = make_ready, requests
        # Replaced, not changed: other threads read it.
        self.served: dict[str, ServedDraft] = (
            {} if drafter is None else {LIVE: ServedDraft(LIVE, drafter)}
        )
        self.router = Router()
        self.swaps: deque[Swap] = deque()  # filled by any thread, emptied by the engine's

    @property
    def live(self) -> ServedDraft:
        return self.served[LIVE]

    @property
    def ready(self) -> list[str]:
        """Names of the drafts that new requests may get."""
        return [name for name, draft in self.served.items() if draft.takes_requests]

    def prepare(self, folder: str, version: str, draft: str = LIVE) -> Swap:
        """Load and check draft weights on the caller's thread and queue them for the next round:
        over those of the draft of that name, or as a further draft beside the live one.

        Raises `UserError` for a draft that does not fit; the old one stays.
        """
        drafters = {name: served.drafter for name, served in self.served.items()}
        try:
            if draft == LIVE or draft in drafters:
                swap = prepare_swap(drafters.get(draft), self.target, folder, version, draft=draft)
            else:
                live = drafters.get(LIVE)
                swap = prepare_new(
                    live, self.target, folder, version, draft=draft, make_ready=self._make_ready
                )
        except UserError:
            self.stats.num_swaps_refused += 1
            raise
        except torch.OutOfMemoryError as error:
            self.stats.num_swaps_refused += 1
            raise UserError(
                f"version {version} found no room on the device ({error}); serve with a smaller "
                "memory_gib or fewer drafts"
            ) from error
        self.swaps.append(swap)
        return swap

    def apply_swaps(self) -> bool:
        """Apply all queued swaps; True when the live draft changed."""
        changed = False
        while self.swaps:
            swap = self.swaps.popleft()
            if swap.claim():
                self._apply(swap)
                changed |= swap.draft == LIVE
        return changed

    def _apply(self, swap: Swap) -> None:
        try:
            pause_s = apply_swap(swap)
        except RuntimeError as error:
            # Whatever mixture of weights drafts now, answers keep the target's distribution.
            log.exception("draft version %s could not be copied in", swap.version)
            swap.error = (
                f"version {swap.version} could not be copied in ({error}); publish it again or "
                "restart the server"
            )
            self.stats.num_swaps_refused += 1
        else:
            self.stats.count_swap(swap.draft, swap.version, pause_s)
        if swap.drafter is not None:
            self.put(swap.draft, swap.drafter)
        self.router.forget(swap.draft)
        swap.done.set()

    def put(self, draft: str, drafter: ServingDrafter) -> None:
        """Serve a drafter under that name; earlier failures do not count against it."""
        self.served = {**self.served, draft: ServedDraft(draft, drafter)}

    def retire(self, draft: str) -> None:
        """Give the draft no more requests; it goes when its last one has ended."""
        if draft in self.served:
            self.served[draft].retired = True
        self.release()

    def release(self) -> None:
        """Drop retired drafts that no request has."""
        if not any(draft.retired for draft in self.served.values()):
            return
        used = {request.route.draft for request in self._requests()}
        gone = [name for name, draft in self.served.items() if draft.retired and name not in used]
        if gone:
            self.served = {name: one for name, one in self.served.items() if name not in gone}
        for draft in gone:
            self.stats.forget(draft)
            self.router.forget(draft)

    def route(self, request: Request) -> None:
        """Choose the draft of a new request; one that does not draft needs none."""
        if request.k > 0:
            # By the name in its records, so that the learner finds the chosen ones.
            name = hashed(request.id)
            request.route = self.router.choose(
                name, request.options.request_class, request.tokens, self.ready
            )
            self.stats.routed[request.route.draft] += 1

    def finished(self, request: Request) -> None:
        """Count the draft's acceptance for the request's class, unless its draws can be repeated
        or it has an adapter, and drop retired drafts."""
        measured = request.route.pool_class and not request.options.adapter
        if measured and not request.repeatable:
            self.router.observe(
                request.route, request.speculation.own_reached, request.speculation.own_kept
            )
        self.release()


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
    return uniform(request, "probe") < PROBES
