"""Tensors that a module's forward pass reads: parameters, buffers, and what kernels keep elsewhere.

vLLM builds kernels' own formats out of a checkpoint's tensors once they are loaded. On a CPU a
linear layer then has an empty weight, and its function `cpu_linear` holds a packed tensor or a
handle: a tensor with the address of memory that oneDNN owns. A slot is one such place. Two modules
of one class have the same slots, so that the contents of one can be put into the other at its fixed
addresses: tensors are copied, addresses in handles exchanged.

Loading and packing may run in any thread. A pass through a handle may not: oneDNN's scratch memory
and its cache of primitives are one per process, and the engine's thread uses them.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Collection, Iterator, Mapping
from typing import Any, NamedTuple, TypeAlias

import torch

# Attributes that hold what requests made, not what a checkpoint says.
RUNTIME_NAMES = frozenset({"kv_cache"})
TENSOR_TABLES = frozenset({"_parameters", "_buffers", "_modules", "_non_persistent_buffers_set"})
PLAIN = (int, float, bool, str, bytes, type(None), torch.dtype, torch.device)


class NotSwappable(Exception):
    """A module whose tensors cannot be exchanged here, in one sentence."""


class Handle(NamedTuple):
    """Packed weight behind an address."""

    address: torch.Tensor  # int64 scalar
    columns: int  # of the weight, the width of an input
    apply: Callable[..., torch.Tensor]  # (input, weight, bias) -> output
    bias: torch.Tensor | None


Slot: TypeAlias = torch.Tensor | Handle
Slots: TypeAlias = Mapping[str, Slot]


def slots_of(model: torch.nn.Module, foreign: Collection[int]) -> dict[str, Slot]:
    """Slots by name, without modules and tensors whose `id` is foreign: those of the target."""
    slots: dict[str, Slot] = {}
    for name, module in model.named_modules():
        if id(module) not in foreign:
            for key, slot in _slots_of_module(module):
                if not (isinstance(slot, torch.Tensor) and id(slot) in foreign):
                    slots[f"{name}.{key}" if name else key] = slot
    return slots


def _slots_of_module(module: torch.nn.Module) -> Iterator[tuple[str, Slot]]:
    for tensors in (module._parameters, module._buffers):
        for key, tensor in tensors.items():
            if tensor is not None and tensor.numel():
                yield key, tensor
    for key, value in vars(module).items():
        if key in RUNTIME_NAMES or (key.startswith("_") and not isinstance(value, torch.Tensor)):
            continue
        if isinstance(value, torch.Tensor):
            if value.numel():
                yield key, value
        elif getattr(value, "__closure__", None):
            yield from _slots_of_function(module, key, value)


def _slots_of_function(
    module: torch.nn.Module, key: str, function: Callable[..., torch.Tensor]
) -> Iterator[tuple[str, Slot]]:
    for name, value in _cells(function):
        if isinstance(value, torch.Tensor):
            yield f"{key}.{name}", value
        elif isinstance(address := getattr(value, "handler_tensor", None), torch.Tensor):
            bias = getattr(module, "bias", None)
            yield f"{key}.{name}", Handle(address, int(value.k), function, bias)


def _cells(function: Any) -> Iterator[tuple[str, Any]]:
    names = function.__code__.co_freevars
    for name, cell in zip(names, function.__closure__ or (), strict=True):
        yield name, cell.cell_contents


def check_made(before: Mapping[str, Any], module: torch.nn.Module) -> None:
    """Refuse a module into which loading put something other than slots and plain values: a swap
    would leave it behind.

    Args:
        before: attributes of the module before it was loaded
    """
    for key, value in vars(module).items():
        if value is before.get(key) or key in TENSOR_TABLES or key in RUNTIME_NAMES:
            continue
        cells = [one for _, one in _cells(value)] if hasattr(value, "__closure__") else [value]
        for one in cells:
            # A list of modules names those of the same module tree; each is swapped by itself.
            parts = one if isinstance(one, list | tuple) else [one]
            if not all(_is_known(part) for part in parts):
                raise NotSwappable(
                    f"{type(module).__name__}.{key} is loaded as a {type(one).__name__}, which "
                    "cannot be exchanged; this engine keeps the draft that it was started with"
                )


def _is_known(value: Any) -> bool:
    known = (*PLAIN, torch.Tensor, torch.nn.Module)
    return isinstance(value, known) or hasattr(value, "handler_tensor")


def check_pairs(served: Slots, staged: Slots) -> None:
    """Same names, kinds, dtypes, shapes and strides."""
    if served.keys() != staged.keys():
        name = sorted(served.keys() ^ staged.keys())[0]
        where = "the served" if name in served else "the staged"
        raise NotSwappable(f"only {where} draft has a tensor {name!r} after loading")
    for name, slot in served.items():
        if _form(slot) != _form(staged[name]):
            raise NotSwappable(
                f"{name!r} is {_form(staged[name])} after loading, {_form(slot)} in the served "
                "draft"
            )


def _form(slot: Slot) -> tuple[Any, ...]:
    if isinstance(slot, Handle):
        return ("packed", slot.columns)
    return (slot.dtype, tuple(slot.shape), slot.stride(), slot.device)


def tensors_in(slots: Slots) -> dict[str, torch.Tensor]:
    return {name: slot for name, slot in slots.items() if isinstance(slot, torch.Tensor)}


def handles_in(slots: Slots) -> dict[str, Handle]:
    return {name: slot for name, slot in slots.items() if isinstance(slot, Handle)}


def tensor_digest(tensor: torch.Tensor) -> str:
    """sha256 of the values, computed in host memory; any thread may call it."""
    with torch.no_grad():
        host = tensor.detach().to("cpu").contiguous()
        data = host.view(-1).view(torch.uint8).numpy() if host.dim() else host.numpy()
    return hashlib.sha256(data).hexdigest()


def handle_digest(handle: Handle, dtype: torch.dtype) -> str:
    """sha256 of the output for a fixed input; by the engine's thread only."""
    generator = torch.Generator().manual_seed(handle.columns)
    probe = torch.randn(1, handle.columns, generator=generator).to(dtype)
    with torch.no_grad():
        output = handle.apply(probe, None, handle.bias)
    return tensor_digest(output)


def combined(digests: Mapping[str, str]) -> str:
    """One digest of all slots, 16 digits."""
    lines = "\n".join(f"{name} {digests[name]}" for name in sorted(digests))
    return hashlib.sha256(lines.encode()).hexdigest()[:16]


def exchange(left: Handle, right: Handle) -> None:
    """Exchange two addresses; each stays in a handle that frees it one day."""
    address = int(left.address)
    left.address.fill_(int(right.address))
    right.address.fill_(address)
