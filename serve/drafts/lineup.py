"""The drafts of an engine as they come, change and go, and which request gets which.

`prepare` is for any thread; all else belongs to the engine's, between two rounds.
"""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Callable, Iterable

import torch

from draftsmith.drafters.interface import ServingDrafter
from draftsmith.drafters.target.target import Target
from draftsmith.errors import UserError
from draftsmith.record import hashed
from draftsmith.serve.drafts.routing import Router
from draftsmith.serve.drafts.swap import Swap, apply_swap, prepare_new, prepare_swap
from draftsmith.serve.engine.propose import Drafting
from draftsmith.serve.requests.request import Request
from draftsmith.serve.requests.route import LIVE
from draftsmith.serve.stats import EngineStats

log = logging.getLogger(__name__)


class Lineup:
    """`make_ready` prepares a further draft for serving as the first one was."""

    def __init__(
        self,
        drafting: Drafting,
        stats: EngineStats,
        target: Target,
        make_ready: Callable[[ServingDrafter], None],
    ):
        self.drafting, self.stats, self.target, self.make_ready = (
            drafting,
            stats,
            target,
            make_ready,
        )
        self.router = Router()
        self.swaps: deque[Swap] = deque()  # filled by any thread, emptied by the engine's

    def prepare(self, folder: str, version: str, draft: str) -> Swap:
        """A swap in the queue, for the draft of that name or for a further one."""
        drafters = {name: served.drafter for name, served in self.drafting.drafts.items()}
        try:
            if draft == LIVE or draft in drafters:
                swap = prepare_swap(drafters.get(draft), self.target, folder, version, draft=draft)
            else:
                live = drafters.get(LIVE)
                swap = prepare_new(
                    live, self.target, folder, version, draft=draft, make_ready=self.make_ready
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

    def take_in(self) -> bool:
        """All swaps in the queue; whether the live draft changed."""
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
            self.drafting.put(swap.draft, swap.drafter)
        self.router.forget(swap.draft)
        swap.done.set()

    def retire(self, draft: str, requests: Iterable[Request]) -> None:
        """No request is given to it any more; it goes when its last one has ended."""
        self.drafting.retire(draft)
        self.release(requests)

    def release(self, requests: Iterable[Request]) -> None:
        """Lets go of retired drafts that none of `requests` has."""
        if not self.drafting.retiring:
            return
        for draft in self.drafting.release({request.route.draft for request in requests}):
            self.stats.forget(draft)
            self.router.forget(draft)

    def route(self, request: Request) -> None:
        """When it comes in; a request that does not draft needs no draft."""
        if request.k > 0:
            # As records name it, so that the learner knows who was chosen.
            name = hashed(request.id)
            request.route = self.router.choose(
                name, request.request_class, request.tokens, self.drafting.ready
            )
            self.stats.routed[request.route.draft] += 1

    def heard(self, request: Request) -> None:
        """The end of a request tells how its draft did for its class, unless its draws can be
        repeated."""
        if request.route.pool_class and not request.repeatable:
            self.router.heard(
                request.route, request.speculation.own_reached, request.speculation.own_kept
            )
