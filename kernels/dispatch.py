"""Choice of the implementation, for all kernels."""

from __future__ import annotations

import importlib.util
import os
from collections.abc import Sequence
from typing import Literal

import torch

from draftsmith.errors import UserError

IMPLS = ("auto", "triton", "torch")


def choose(impl: str, device: torch.device, dtype: torch.dtype) -> Literal["triton", "torch"]:
    """`"auto"` is Triton on CUDA and torch elsewhere. Asking for Triton where it cannot run raises
    a `UserError`.

    The Triton kernels compute in float32, so that `"auto"` leaves float64 to torch.
    """
    if impl not in IMPLS:
        raise UserError(f"impl is {impl!r}; it must be one of {', '.join(IMPLS)}")
    # Asked every round: the common case must not search for modules.
    if impl == "torch" or (impl == "auto" and (device.type != "cuda" or dtype == torch.float64)):
        return "torch"
    obstacle = _obstacle(device)
    if impl == "triton" and obstacle:
        raise UserError(f"impl 'triton' cannot run on {device}: {obstacle}")
    if impl == "auto" and obstacle:
        return "torch"
    return "triton"


def reads_freely(device: torch.device) -> bool:
    """True where looking at a value costs nothing. Elsewhere it waits for all that was launched,
    and no CUDA graph can hold it."""
    return device.type == "cpu"


def pins(device: torch.device) -> bool:
    """True where copies from and to page-locked memory run while the host goes on."""
    return device.type == "cuda"


def sent(device: torch.device, *columns: Sequence[int] | torch.Tensor) -> tuple[torch.Tensor, ...]:
    """int64 columns [n] of the host, each of its own length, on `device` by one copy that the host
    does not wait for."""
    host = torch.cat([torch.as_tensor(column, dtype=torch.int64) for column in columns])
    return sent_tensor(device, host).split([len(column) for column in columns])


def sent_tensor(device: torch.device, host: torch.Tensor) -> torch.Tensor:
    """A tensor of the host on `device`, from page-locked memory, which torch keeps until the copy
    is over."""
    return host.pin_memory().to(device, non_blocking=True) if pins(device) else host.to(device)


class Reading:
    """A copy of a device's tensor on its way to page-locked memory of the host. What is launched
    later may write into the tensor."""

    def __init__(self, tensor: torch.Tensor):
        self._host = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True)
        self._host.copy_(tensor, non_blocking=True)
        self._arrival = _recorded_event(tensor.device)

    def wait(self) -> torch.Tensor:
        """The copy. Behind another wait for what was launched later it has arrived."""
        self._arrival.synchronize()
        return self._host


def _recorded_event(device: torch.device) -> torch.Event:
    event = torch.Event(device=device)
    event.record()
    return event


def use_device(device: torch.device | str) -> None:
    """Make `device` the current one of this thread, where Triton launches and streams are made. A
    thread begins at the first device, wherever the tensors are. Nothing for a device other than
    CUDA or without a number."""
    there = torch.device(device)
    if there.type == "cuda" and there.index is not None:
        torch.cuda.set_device(there)


def interpreted() -> bool:
    """Triton reads this variable when it is imported; its interpreter runs kernels on the CPU,
    slowly, for tests."""
    return os.environ.get("TRITON_INTERPRET", "0") == "1"


def _obstacle(device: torch.device) -> str:
    """Reason why Triton cannot run there; empty when it can."""
    if importlib.util.find_spec("triton") is None:
        return "triton is not installed; install it or use impl 'torch'"
    if device.type != "cuda" and not interpreted():
        return "it needs a CUDA tensor, or TRITON_INTERPRET=1 set before the start"
    return ""
