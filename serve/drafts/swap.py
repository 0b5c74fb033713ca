"""New draft weights under a running engine: loaded and checked beside it, copied between rounds to
the old addresses.

A draft with a new name comes as a module of its own, made ready beside the engine as well, and is
taken in between rounds.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
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
from draftsmith.serve.requests.request import LIVE


class SwapLate(UserError):
    """Timeout of a swap that the engine did not come to; the version itself is fine."""


@dataclass
class Swap:
    """A checked set of weights on its way in. `done` is set once the engine serves with it, or
    `error` says why it does not."""

    version: str
    pairs: list[tuple[torch.Tensor, torch.Tensor]]  # live tensor, new values
    draft: str = LIVE  # which of the engine's drafts it is for
    drafter: ServingDrafter | None = None  # what drafts with it
    done: threading.Event = field(default_factory=threading.Event)
    pause_s: float = 0.0
    error: str = ""
    _taken: threading.Lock = field(default_factory=threading.Lock)

    def claim(self) -> bool:
        """True for the first caller alone: the engine that copies it in, or `give_up`."""
        return self._taken.acquire(blocking=False)

    def give_up(self) -> bool:
        """Withdraw the swap; False once the engine has begun to copy it."""
        if not self.claim():
            return False
        self.pairs.clear()
        return True


def prepare_swap(
    drafter: ServingDrafter | None, target: Target, folder: str, version: str, *, draft: str = LIVE
) -> Swap:
    """Swap that copies over the weights of `drafter`, which it keeps: the engine may have dropped
    the draft by then."""
    live = model_of(drafter, version)
    served, pairs = live.state_dict(), []
    for name, values in checked_weights(live, load(Path(folder), target), version).items():
        # What both share with the target (an embedding, say) needs no copy.
        if values.data_ptr() != served[name].data_ptr():
            pairs.append((served[name], values.to(served[name])))
    return Swap(version, pairs, draft, drafter)


def prepare_new(
    drafter: ServingDrafter | None,
    target: Target,
    folder: str,
    version: str,
    *,
    draft: str,
    make_ready: Callable[[ServingDrafter], None],
) -> Swap:
    """A further draft beside `drafter`, the live one, which it must be like; `make_ready` prepares
    it for serving."""
    live = model_of(drafter, version)
    new = load(Path(folder), target, dtype=next(live.parameters()).dtype)
    checked_weights(live, new, version)
    further = drafter.beside(new) if isinstance(drafter, TextFirst) else new
    make_ready(further)
    return Swap(version, [], draft, further)


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
