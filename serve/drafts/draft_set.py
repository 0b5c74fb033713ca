"""Drafts that an engine serves: their loading, swapping and retiring, and the draft of each
request, chosen once, when it comes in, before anything is drawn.

Drafts have names: `LIVE` and `CANARY` (a version on trial). `prepare` may run on any thread; all
else runs on the engine's, between two rounds.
"""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Callable, Iterable

import torch

from draftsmith.drafters.interface import ServingDrafter
from draftsmith.drafters.target.target import Target
from draftsmith.drafters.versions import in_canary
from draftsmith.errors import UserError
from draftsmith.record import hashed
from draftsmith.serve.drafts.served import ServedDraft
from draftsmith.serve.drafts.swap import Swap, apply_swap, prepare_new, prepare_swap
from draftsmith.serve.requests.request import CANARY, LIVE, Request
from draftsmith.serve.stats import EngineStats

log = logging.getLogger(__name__)


class DraftSet:
    """Drafts by name: the live one and, beside it, one on trial of its family and shape.

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
        self.canary_share = 0.0  # of the requests, for the version on trial; any thread may set it
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
                "memory_gib"
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
        used = {request.draft_name for request in self._requests()}
        gone = [name for name, draft in self.served.items() if draft.retired and name not in used]
        if gone:
            self.served = {name: one for name, one in self.served.items() if name not in gone}
        for draft in gone:
            self.stats.forget(draft)

    def route(self, request: Request) -> None:
        """Choose the draft of a new request; one that does not draft needs none."""
        if request.k > 0:
            # By the name in its records, so that the learner finds the chosen ones.
            if CANARY in self.ready and in_canary(hashed(request.id), self.canary_share):
                request.draft_name = CANARY
            self.stats.routed[request.draft_name] += 1
