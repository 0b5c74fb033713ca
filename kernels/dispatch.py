"""The one choice of what computes an operation, and what a device lets the host do.

An operation is a reference in torch, whole, under `operation`. `BACKENDS` names what stands beside
it. Products are chosen among by their times (`measured`).
"""

from __future__ import annotations

import functools
import importlib
import importlib.util
import os
from array import array
from collections.abc import Callable, Iterable, Sequence
from types import ModuleType
from typing import Any, Literal, NamedTuple, ParamSpec, TypeVar

import torch

from draftsmith.errors import UserError

IMPLS = ("auto", "triton", "torch")

Params = ParamSpec("Params")
Output = TypeVar("Output")


class Backend(NamedTuple):
    """Functions below `draftsmith.kernels` that take the arguments of an operation; empty where
    there is none. One that returns None leaves the call to the reference."""

    triton: str = ""
    cpu: str = ""  # compiled, for a CPU with a C++ compiler


# By the names of the references.
BACKENDS = {
    "verify_chain": Backend("verify.chain_triton:verify_chain_triton"),
    "verify_logits": Backend(
        "verify.chain_triton:verify_logits_triton", "verify.chain:verify_logits_compiled"
    ),
    "verify_block": Backend("verify.block_triton:verify_block_triton"),
    "verify_tree": Backend("verify.tree_triton:verify_tree_triton"),
    "verify_sure_tree": Backend("", "verify.tree:verify_sure_tree_compiled"),
    "process": Backend("sampling.draw_triton:process_triton"),
    "draw": Backend("sampling.draw_triton:draw_triton", "sampling.draw:draw_compiled"),
    "draw_several": Backend("sampling.draw_triton:draw_several_triton"),
    "uniforms": Backend(cpu="sampling.random_streams:uniforms_compiled"),
    "prob_arrays": Backend(cpu="sampling.logged:prob_arrays_compiled"),
    "attention_context": Backend(
        "attention.paged_triton:triton_context", "attention.paged_compiled:compiled_context"
    ),
    "divergence_terms": Backend(
        "divergence.rows_triton:divergence_rows_triton", "divergence.rows:divergence_rows_compiled"
    ),
}


def operation(reference: Callable[Params, Output]) -> Callable[Params, Output]:
    """Decorator of a reference, whose `impl` says what computes it: "auto", "triton" or "torch",
    which is the reference itself. The device and the dtype are those of its first tensor."""
    of = reference.__name__

    @functools.wraps(reference)
    def run(*args: Params.args, **kwargs: Params.kwargs) -> Output:
        impl = str(kwargs.pop("impl", "auto"))
        if impl != "torch":
            first = args[0] if args else None
            if not isinstance(first, torch.Tensor):
                first = _first_tensor((*args, *kwargs.values()))
            chosen = backend_of(impl, first.device, first.dtype)
            name = "" if chosen == "torch" else getattr(BACKENDS[of], chosen)
            found = _function(name)(*args, **kwargs) if name else None
            if found is not None:
                return found
        return reference(*args, **kwargs)

    return run


def _function(name: str) -> Callable[..., Any]:
    module, function = _place(name)
    return getattr(module, function)


@functools.cache
def _place(name: str) -> tuple[ModuleType, str]:
    module, _, function = name.partition(":")
    return importlib.import_module(f"draftsmith.kernels.{module}"), function


def backend_of(
    impl: str, device: torch.device, dtype: torch.dtype
) -> Literal["triton", "cpu", "torch"]:
    """As `choose`; `"auto"` on a CPU is what is compiled for it."""
    chosen = choose(impl, device, dtype)
    return "cpu" if chosen == "torch" and impl == "auto" and reads_freely(device) else chosen


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


def read_freely(numbers: torch.Tensor) -> list[Any] | None:
    """Numbers where looking at them costs nothing; None elsewhere."""
    return numbers.tolist() if reads_freely(numbers.device) else None


def side_by_side(tensor: torch.Tensor) -> torch.Tensor:
    """The tensor where the numbers of its last dimension lie side by side, else a copy."""
    return tensor if tensor.stride(-1) == 1 else tensor.contiguous()


def pins(device: torch.device) -> bool:
    """True where work and copies from and to page-locked memory run while the host goes on, and
    graphs hold them: on CUDA."""
    return device.type == "cuda"


def autocast(
    device: torch.device, dtype: torch.dtype | None = None, *, enabled: bool = True
) -> torch.autocast:
    return torch.autocast(device.type, dtype, enabled=enabled)


def autocast_dtype(device: torch.device) -> torch.dtype | None:
    """The type of products under autocast; None without it."""
    if torch.is_autocast_enabled(device.type):
        return torch.get_autocast_dtype(device.type)
    return None


def sent(device: torch.device, *columns: Sequence[int] | torch.Tensor) -> tuple[torch.Tensor, ...]:
    """int64 columns [n] of the host, each of its own length, on `device` by one copy that the host
    does not wait for."""
    if not columns:
        return ()
    if reads_freely(device):
        return tuple(map(_here, columns))
    # Each begins at a multiple of 16 bytes: Triton compiles a kernel again for those that do not.
    lengths = [len(column) for column in columns]
    sizes = [length + length % 2 for length in lengths]
    parts = sent_tensor(device, _here(_joined(columns))).split_with_sizes(sizes)
    found = [
        part if size == length else part[:length]
        for part, size, length in zip(parts, sizes, lengths)
    ]
    return tuple(found)


def _here(column: Sequence[int] | torch.Tensor) -> torch.Tensor:
    """A column on the host. Not by `torch.tensor`, which takes several times as long."""
    if isinstance(column, torch.Tensor):
        return column
    return (
        torch.frombuffer(array("q", column), dtype=torch.int64)
        if column
        else torch.empty(0, dtype=torch.int64)
    )


def _joined(columns: Iterable[Sequence[int] | torch.Tensor]) -> array[int]:
    """Numbers of all columns, a zero behind each of an odd length. An array costs a fraction of the
    tensors."""
    numbers = array("q")
    for column in columns:
        if isinstance(column, torch.Tensor):
            numbers.frombytes(column.long().numpy().tobytes())
        else:
            numbers.extend(array("q", column))
        if len(column) % 2:
            numbers.append(0)
    return numbers


def sent_tensor(device: torch.device, host: torch.Tensor) -> torch.Tensor:
    """A tensor of the host on `device`, from page-locked memory, which torch keeps until the copy
    is over."""
    return host.pin_memory().to(device, non_blocking=True) if pins(device) else host.to(device)


class Upload:
    """int64 columns [n] of the host that are on `device` before they are asked for: `parts` are
    those of all `groups`, each of which is asked for at once."""

    def __init__(
        self,
        device: torch.device,
        groups: Sequence[Sequence[Sequence[int]]] = (),
        parts: Iterable[torch.Tensor] = (),
    ):
        self.device, rest = device, iter(parts)
        self._groups = [(tuple(group), tuple(next(rest) for _ in group)) for group in groups]

    def of(self, *columns: Sequence[int]) -> tuple[torch.Tensor, ...]:
        """`columns` on the device. Those of none of the groups are sent by a copy of their own."""
        for group, parts in self._groups:
            if group == columns:
                return parts
        return sent(self.device, *columns)


class Reading:
    """A copy of a device's tensor on its way to page-locked memory of the host. What is launched
    later may write into the tensor. Where looking costs nothing it is the tensor."""

    def __init__(self, tensor: torch.Tensor):
        self._host = tensor
        self._arrival: torch.Event | None = None
        if reads_freely(tensor.device):
            return
        self._host = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True)
        self._host.copy_(tensor, non_blocking=True)
        self._arrival = _recorded_event(tensor.device)

    def wait(self) -> torch.Tensor:
        """The copy. Behind another wait for what was launched later it has arrived."""
        if self._arrival is not None:
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


def on_its_device(launcher: Callable[Params, Output]) -> Callable[Params, Output]:
    """Decorator of a function that launches Triton kernels: the device of its first tensor is the
    current one until it returns.

    Triton launches on the current device, which every thread starts at device 0, wherever the
    tensors are.
    """

    @functools.wraps(launcher)
    def launch(*args: Params.args, **kwargs: Params.kwargs) -> Output:
        with torch.cuda.device_of(_first_tensor((*args, *kwargs.values()))):
            return launcher(*args, **kwargs)

    return launch


def _first_tensor(args: Iterable[Any]) -> torch.Tensor:
    """Looks into tuples too."""
    for arg in args:
        members = arg if isinstance(arg, tuple) else (arg,)
        for member in members:
            if isinstance(member, torch.Tensor):
                return member
    raise TypeError("no tensor is given")


def _obstacle(device: torch.device) -> str:
    """Reason why Triton cannot run there; empty when it can."""
    if importlib.util.find_spec("triton") is None:
        return "triton is not installed; install it or use impl 'torch'"
    if device.type != "cuda" and not interpreted():
        return "it needs a CUDA tensor, or TRITON_INTERPRET=1 set before the start"
    return ""
