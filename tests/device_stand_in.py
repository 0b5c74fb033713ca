"""A device that is none: tensors that say they are on one and keep their values on the CPU, so that
what a round copies and waits for can be counted.

Its name is the meta device's, which torch takes everywhere and computes nothing on. As on CUDA,
reading a value is a wait, as is a copy from memory that is not page-locked and a size that depends
on values; a copy from page-locked memory is an upload and no wait. Attention and Triton's kernels
are one launch each.
"""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any, NamedTuple

import pytest
import torch
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_flatten, tree_map_only, tree_unflatten

from draftsmith.kernels import dispatch
from draftsmith.kernels.attention import paged
from draftsmith.kernels.sampling import logged, random_streams
from draftsmith.serve.engine import round

DEVICE = torch.device("meta")
# Operations that give the host a number, and those whose size depends on values.
NUMBERS = ("_local_scalar_dense", "is_nonzero", "item", "equal")
SIZES = ("nonzero", "masked_select", "_unique2", "unique_dim", "unique_consecutive", "bincount")
INDEXED = ("index", "index_put", "index_put_")
METHODS = ("tolist", "numpy", "item", "__bool__", "__int__", "__float__", "__index__")


class Event(NamedTuple):
    kind: str  # "wait" or "upload"
    where: str  # the innermost line of the project's
    drafting: bool  # while a drafter drafts
    what: str


class DeviceTensor(torch.Tensor):
    held: torch.Tensor  # the value, on the CPU

    @staticmethod
    def __new__(cls, held: torch.Tensor) -> DeviceTensor:
        made = torch.Tensor._make_wrapper_subclass(
            cls,
            held.shape,
            strides=held.stride(),
            storage_offset=held.storage_offset(),
            dtype=held.dtype,
            device=DEVICE,
        )
        made.held = held
        return made

    __torch_function__ = torch._C._disabled_torch_function_impl

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        raise RuntimeError(f"{func} outside of the stand-in")


class StandIn(TorchDispatchMode):
    """Counts while it is entered."""

    def __init__(self) -> None:
        super().__init__()
        self.events: list[Event] = []
        self.launches: Counter[str] = Counter()
        self.num_waits = 0  # `clear` leaves it
        self._pinned: dict[int, torch.Tensor] = {}

    def clear(self) -> None:
        self.events.clear()
        self.launches.clear()

    def copy(self) -> StandIn:
        """What was counted so far."""
        made = StandIn()
        made.events, made.launches = list(self.events), self.launches.copy()
        return made

    def count(self, kind: str, *, drafting: bool = False) -> int:
        return sum(event.kind == kind and event.drafting == drafting for event in self.events)

    def pin(self, tensor: torch.Tensor) -> torch.Tensor:
        copy = tensor.clone()
        self._pinned[copy.untyped_storage().data_ptr()] = copy
        return copy

    def note(self, kind: str, what: str) -> None:
        where, drafting, frame = "", False, sys._getframe(1)
        while frame is not None:
            name = frame.f_code.co_filename
            _, ours, path = name.rpartition("draftsmith/")
            if ours and not path.startswith("tests/"):
                line = f"{path}:{frame.f_lineno}"
                where = where or line
                proposes = frame.f_code.co_name in ("propose", "propose_tree")
                drafting = drafting or (line.startswith("drafters/") and proposes)
            frame = frame.f_back
        self.num_waits += kind == "wait"
        self.events.append(Event(kind, where, drafting, what))

    def uploaded(self, what: str, *, waits: bool) -> None:
        self.note("upload", what)
        if waits:
            self.note("wait", what)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = func.overloadpacket.__name__
        flat, spec = tree_flatten((args, kwargs or {}))
        tensors = [one for one in flat if isinstance(one, torch.Tensor)]
        devices = [one for one in flat if isinstance(one, torch.device)]
        ours = [one for one in tensors if isinstance(one, DeviceTensor)]
        arrives = any(device.type == DEVICE.type for device in devices)
        if not ours and not arrives:
            return func(*args, **(kwargs or {}))
        leaves = name in NUMBERS or (bool(devices) and not arrives)
        if leaves:
            self.note("wait", name)
        else:
            self._count(name, tensors, args, kwargs or {}, arrives=arrives)
        plain = [_on_host(one) for one in flat]
        args, kwargs = tree_unflatten(plain, spec)
        found = func(*args, **kwargs)
        if leaves or (name == "copy_" and not isinstance(tensors[0], DeviceTensor)):
            return found
        # What an operation writes in place stays the same tensor.
        known = {id(one.held): one for one in ours}
        return tree_map_only(
            torch.Tensor,
            lambda one: known[id(one)] if id(one) in known else DeviceTensor(one),
            found,
        )

    def _count(
        self, name: str, tensors: list[torch.Tensor], args: Any, kwargs: Any, *, arrives: bool
    ) -> None:
        self.launches[name] += 1
        hosts = [one for one in tensors if not isinstance(one, DeviceTensor)]
        if name == "copy_":
            if hosts and (hosts[0].ndim or hosts[0] is args[0]):
                free = self._is_free(hosts[0], kwargs.get("non_blocking", (*args, False)[2]))
                if hosts[0] is not args[0]:
                    self.uploaded(name, waits=not free)
                elif not free:
                    self.note("wait", name)
        elif arrives and hosts:
            self.uploaded(name, waits=not self._is_free(hosts[0], kwargs.get("non_blocking")))
        elif name in SIZES or _sizes_by_value(name, args, kwargs):
            self.note("wait", name)
        elif name in INDEXED:
            for index in filter(lambda one: one is not None, args[1]):
                if index.dtype == torch.bool and (name == "index" or args[2].numel() != 1):
                    self.note("wait", f"{name} by a mask")
                if not isinstance(index, DeviceTensor):
                    self.uploaded(f"{name} by the host's", waits=True)
        elif any(one.ndim for one in hosts):
            raise RuntimeError(f"{name} of tensors on the host and on the device")

    def _is_free(self, host: torch.Tensor, non_blocking: Any) -> bool:
        return bool(non_blocking) and host.untyped_storage().data_ptr() in self._pinned


class RecordedEvent:
    """Behind all that was launched so far. A wait for what was launched later covers it."""

    def __init__(self, device: StandIn):
        self.device, self.num_waits = device, device.num_waits

    def synchronize(self) -> None:
        if self.device.num_waits == self.num_waits:
            self.device.note("wait", "event")


class PythonCalls(TorchFunctionMode):
    """Calls that do not reach the dispatcher as they are."""

    def __init__(self, device: StandIn):
        super().__init__()
        self.device = device

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs, name = kwargs or {}, getattr(func, "__name__", "")
        first = args[0] if args else None
        if name == "pin_memory" and not isinstance(first, DeviceTensor):
            return self.device.pin(first)
        if kwargs.get("pin_memory"):
            return self.device.pin(func(*args, **{**kwargs, "pin_memory": False}))
        if name in ("tensor", "as_tensor") and kwargs.get("device") == DEVICE:
            if isinstance(first, DeviceTensor):
                return first
            self.device.uploaded(name, waits=True)
            return DeviceTensor(func(*args, **{**kwargs, "device": "cpu"}))
        if isinstance(first, DeviceTensor):
            if name in METHODS:
                self.device.note("wait", name)
                return func(first.held, *args[1:], **kwargs)
            if name in ("__getitem__", "__setitem__"):
                args = (first, _index(args[1]), *args[2:])
        return func(*args, **kwargs)


def _sizes_by_value(name: str, args: Any, kwargs: Any) -> bool:
    """True for repeats that the device counts. A number of them is the host's."""
    if name != "repeat_interleave" or kwargs.get("output_size") is not None:
        return False
    return len(args) == 1 or isinstance(args[1], torch.Tensor)


def _index(index: Any) -> Any:
    """Lists in an index as the tensors that torch makes of them."""
    parts = index if isinstance(index, tuple) else (index,)
    parts = tuple(torch.tensor(one) if isinstance(one, list) else one for one in parts)
    return parts if isinstance(index, tuple) else parts[0]


def _on_host(one: Any) -> Any:
    if isinstance(one, DeviceTensor):
        return one.held
    return torch.device("cpu") if isinstance(one, torch.device) else one


def on_host(values: Any) -> Any:
    return tree_map_only(DeviceTensor, lambda tensor: tensor.held, values)


def on_device(value: torch.Tensor) -> DeviceTensor:
    return value if isinstance(value, DeviceTensor) else DeviceTensor(value.detach().clone())


def move(module: torch.nn.Module) -> None:
    """Move the weights of a module, and of modules that it keeps in tuples."""
    for one in module.modules():
        for name, value in one._parameters.items():
            if value is not None:
                moved = torch.nn.Parameter(on_device(value), requires_grad=False)
                one._parameters[name] = moved
        for name, value in one._buffers.items():
            if value is not None:
                one._buffers[name] = on_device(value)
        for value in list(vars(one).values()):
            for part in value if isinstance(value, tuple) else ():
                if isinstance(part, torch.nn.Module):
                    move(part)


class HostAttention:
    """A pass's attention as one launch a layer."""

    def __init__(self, kind: Callable[..., Any], *given: Any):
        self.context = kind(*on_host(given))

    @property
    def slots(self) -> torch.Tensor:
        return DeviceTensor(self.context.slots)

    def attend(self, *given: Any) -> torch.Tensor:
        return DeviceTensor(self.context.attend(*on_host(given)))


def kernel(device: StandIn, name: str, function: Callable[..., Any]) -> Callable[..., Any]:
    """`function` of the host's tensors as one launch."""

    def launched(*args: Any, **kwargs: Any) -> Any:
        device.launches[name] += 1
        found = function(*on_host(args), **on_host(kwargs))
        return tree_map_only(torch.Tensor, DeviceTensor, found)

    return launched


@contextmanager
def device(monkeypatch: pytest.MonkeyPatch) -> Iterator[StandIn]:
    """The stand-in, entered, with attention on it."""
    stand_in, context = StandIn(), paged.attention_context
    with monkeypatch.context() as patch, PythonCalls(stand_in), stand_in:
        patch.setattr(
            paged,
            "attention_context",
            lambda keys, *given, impl: (
                HostAttention(partial(context, keys.held, impl="torch"), *given)
                if isinstance(keys, DeviceTensor)
                else context(keys, *given, impl=impl)
            ),
        )
        patch.setattr(dispatch, "_obstacle", lambda device: "")
        for module in (dispatch, logged):
            patch.setattr(module, "pins", lambda device: device == DEVICE)
        patch.setattr(dispatch, "_recorded_event", lambda device: RecordedEvent(stand_in))
        forget_tensors()
        yield stand_in
        forget_tensors()


def forget_tensors() -> None:
    """Of a device of the same name: tests leave real ones of the meta device, too."""
    random_streams._token_offsets.cache_clear()
    round._distributions.cache_clear()
