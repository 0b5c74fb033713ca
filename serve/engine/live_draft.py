"""Draft that an engine serves: its failures and pauses, and new weights under the running engine,
loaded and checked beside it and copied between rounds to the old addresses.

`prepare` may run on any thread; all else runs on the engine's, between two rounds.
"""

from __future__ import annotations

import logging
from collections import deque
from concurrent.futures import Future
from dataclasses import dataclass, field
from pathlib import Path
from time import perf_counter

import torch

from draftsmith.drafters.checkpoint import load
from draftsmith.drafters.interface import ServingDrafter, TrainedDrafter
from draftsmith.drafters.target.target import Target
from draftsmith.drafters.text.text_first import TextFirst
from draftsmith.errors import UserError
from draftsmith.kernels.dispatch import pins
from draftsmith.serve.stats import EngineStats

log = logging.getLogger(__name__)

PROBE = 4  # a draft in quarantine drafts in one of so many rounds: enough to measure it
LONGEST_PAUSE = 256  # rounds without drafting after a drafter has failed again and again


class SwapLate(UserError):
    """Timeout of a swap that the engine did not come to; the version itself is fine."""


@dataclass
class Swap:
    """A checked set of weights on its way in. `applied` ends once the engine serves with it, or
    with the error for which it does not; cancelled, it never is."""

    version: str
    pairs: list[tuple[torch.Tensor, torch.Tensor]]  # live tensor, new values
    applied: Future[None] = field(default_factory=Future)
    pause_s: float = 0.0


class LiveDraft:
    """`drafter` None: no speculation. `stats` are the engine's."""

    def __init__(self, drafter: ServingDrafter | None, target: Target, stats: EngineStats):
        self.drafter, self.target, self.stats = drafter, target, stats
        self.swaps: deque[Swap] = deque()  # filled by any thread, emptied by the engine's
        self._begin()

    def _begin(self) -> None:
        """Starts with new weights, against which nothing counts yet."""
        self.quarantined = False  # made for other weights of the target: it drafts seldom
        self._failures = 0
        self._pause = 0

    def take_turn(self) -> bool:
        """True when the draft may draft in this round. Counts down the pause that follows failures,
        or a turn in quarantine."""
        if self._pause > 0:
            self._pause -= 1
            return False
        if self.quarantined:
            self._pause = PROBE - 1
        return True

    def succeeded(self) -> None:
        self._failures = 0

    def failed(self, cause: str, error: object) -> None:
        self._failures += 1
        self._pause = min(2 ** (self._failures - 1), LONGEST_PAUSE) - 1
        if self._pause < LONGEST_PAUSE - 1 or self._failures % 16 == 0:
            log.warning(
                "the draft failed (%s: %s); it rests for %d rounds", cause, error, self._pause
            )

    def prepare(self, folder: str, version: str) -> Swap:
        """Load and check draft weights on the caller's thread and queue them for the next round.

        Raises `UserError` for a draft that does not fit; the old one stays.
        """
        try:
            swap = prepare_swap(self.drafter, self.target, folder, version)
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
        """Apply all queued swaps; True when there was one."""
        changed = False
        while self.swaps:
            swap = self.swaps.popleft()
            if swap.applied.set_running_or_notify_cancel():
                self._apply(swap)
                changed = True
        return changed

    def _apply(self, swap: Swap) -> None:
        self._begin()
        try:
            pause_s = apply_swap(swap)
        except RuntimeError as error:
            # Whatever mixture of weights drafts now, answers keep the target's distribution.
            log.exception("draft version %s could not be copied in", swap.version)
            self.stats.num_swaps_refused += 1
            told = (
                f"version {swap.version} could not be copied in ({error}); publish it again or "
                "restart the server"
            )
            swap.applied.set_exception(UserError(told))
        else:
            self.stats.count_swap(swap.version, pause_s)
            swap.applied.set_result(None)


def prepare_swap(drafter: ServingDrafter | None, target: Target, folder: str, version: str) -> Swap:
    live = model_of(drafter, version)
    served, pairs = live.state_dict(), []
    for name, values in checked_weights(live, load(Path(folder), target), version).items():
        # What both share with the target (an embedding, say) needs no copy.
        if values.data_ptr() != served[name].data_ptr():
            pairs.append((served[name], values.to(served[name])))
    return Swap(version, pairs)


def model_of(drafter: ServingDrafter | None, version: str) -> torch.nn.Module:
    if isinstance(drafter, TextFirst):
        drafter = drafter.model
    if not isinstance(drafter, torch.nn.Module):
        raise UserError(
            f"version {version} cannot be swapped in: the server runs without a trained draft; "
            "start it with one"
        )
    return drafter


def checked_weights(
    live: torch.nn.Module, new: TrainedDrafter, version: str
) -> dict[str, torch.Tensor]:
    """Weights of `new`, checked to be finite and of the family and shape of `live`."""
    if new.family != live.family:
        raise UserError(
            f"version {version} is a {new.family} draft but {live.family} is being served; "
            "publish that family"
        )
    if new.taps != live.taps:
        raise UserError(
            f"version {version} reads layers {new.taps} but {live.taps} are served; publish "
            "drafts of one shape"
        )
    served, fresh = live.state_dict(), new.state_dict()
    if served.keys() != fresh.keys():
        name = sorted(served.keys() ^ fresh.keys())[0]
        raise UserError(
            f"version {version} and the served draft differ in tensor {name!r}; publish drafts of "
            "one shape"
        )
    for name, values in fresh.items():
        if values.shape != served[name].shape:
            shapes = f"{list(values.shape)}, served is {list(served[name].shape)}"
            raise UserError(
                f"version {version} has {name!r} of shape {shapes}; publish drafts of one shape"
            )
        if values.is_floating_point() and not bool(torch.isfinite(values).all()):
            raise UserError(
                f"version {version} has values in {name!r} that are not finite; the served draft "
                "stays"
            )
    return fresh


@torch.no_grad()
def apply_swap(swap: Swap) -> float:
    """Copies the weights in; returns the seconds that took."""
    begun_s = perf_counter()
    for live, values in swap.pairs:
        live.copy_(values)
    if swap.pairs and pins(device := swap.pairs[0][0].device):
        torch.cuda.synchronize(device)
    swap.pause_s = perf_counter() - begun_s
    return swap.pause_s
