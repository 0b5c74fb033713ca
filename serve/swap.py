"""New draft weights under a running engine: loaded and checked beside it, copied between rounds to the old addresses."""

from __future__ import annotations

import threading
from dataclasses import dataclass, field
from pathlib import Path
from time import perf_counter

import torch

from draftsmith.drafters.checkpoint import load
from draftsmith.drafters.interface import ServingDrafter
from draftsmith.drafters.target import Target
from draftsmith.drafters.text_first import TextFirst
from draftsmith.errors import UserError


class SwapLate(UserError):
    """Nothing is wrong with the version; the engine did not come to it."""


@dataclass
class Swap:
    """A checked set of weights on its way in. `done` is set once the engine serves with it, or `error` says why it does not."""

    version: str
    pairs: list[tuple[torch.Tensor, torch.Tensor]]  # live tensor, new values
    done: threading.Event = field(default_factory=threading.Event)
    pause_s: float = 0.0
    error: str = ""
    _taken: threading.Lock = field(default_factory=threading.Lock)

    def claim(self) -> bool:
        """True for the first caller alone: the engine that copies it in, or `give_up`."""
        return self._taken.acquire(blocking=False)

    def give_up(self) -> bool:
        """Whether it will not come; False once the engine has begun."""
        if not self.claim():
            return False
        self.pairs.clear()
        return True


def prepare_swap(drafter: ServingDrafter | None, target: Target, folder: str, version: str) -> Swap:
    if isinstance(drafter, TextFirst):
        drafter = drafter.model
    if not isinstance(drafter, torch.nn.Module):
        raise UserError(f"version {version} cannot be swapped in: the server runs without a trained draft; start it with one")
    new = load(Path(folder), target)
    if new.family != drafter.family:
        raise UserError(f"version {version} is a {new.family} draft but {drafter.family} is being served; publish that family")
    live, fresh = drafter.state_dict(), new.state_dict()
    if live.keys() != fresh.keys():
        name = sorted(live.keys() ^ fresh.keys())[0]
        raise UserError(f"version {version} and the served draft differ in tensor {name!r}; publish drafts of one shape")
    pairs = []
    for name, values in fresh.items():
        if values.shape != live[name].shape:
            shapes = f"{list(values.shape)}, served is {list(live[name].shape)}"
            raise UserError(f"version {version} has {name!r} of shape {shapes}; publish drafts of one shape")
        if values.is_floating_point() and not bool(torch.isfinite(values).all()):
            raise UserError(f"version {version} has values in {name!r} that are not finite; the served draft stays")
        # What both share with the target (an embedding, say) needs no copy.
        if values.data_ptr() != live[name].data_ptr():
            pairs.append((live[name], values.to(live[name])))
    return Swap(version, pairs)


@torch.no_grad()
def apply_swap(swap: Swap) -> float:
    """Copies the weights in; returns the seconds that took."""
    begun_s = perf_counter()
    for live, values in swap.pairs:
        live.copy_(values)
    if swap.pairs and swap.pairs[0][0].is_cuda:
        torch.cuda.synchronize(swap.pairs[0][0].device)
    swap.pause_s = perf_counter() - begun_s
    return swap.pause_s
