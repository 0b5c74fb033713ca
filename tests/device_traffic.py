"""Stand-ins for an accelerator on a machine without one: counts of what would cross between host
and device, and graphs that run again what they captured.

The meta device stands for the accelerator: its tensors have no values, so whatever looks at one
raises, after it was counted.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

FACTORIES = ("tensor", "as_tensor")
COPIES = ("_to_copy", "copy_", "to")
LOOKS = ("item", "_local_scalar_dense", "nonzero", "masked_select", "equal", "unique_consecutive")
NO_KERNEL = ("empty", "empty_like", "empty_strided", "lift_fresh", "new_empty", "_unsafe_view")


class Traffic:
    """What was done within `counted`."""

    def __init__(self) -> None:
        self.uploads: list[str] = []  # copies of values of the host to the device
        self.looks: list[str] = []  # at values of the device
        self.operations: Counter[str] = Counter()  # that launch a kernel, replays among them
        self._replaying = False

    @property
    def num_operations(self) -> int:
        return self.operations.total()

    @contextmanager
    def counted(self) -> Iterator[Traffic]:
        with ExitStack() as stack:
            stack.enter_context(_Calls(self))
            stack.enter_context(_Dispatches(self))
            _CURRENT.append(self)
            stack.callback(_CURRENT.remove, self)
            yield self


class _Calls(TorchFunctionMode):
    """Values of Python that become tensors of the device."""

    def __init__(self, traffic: Traffic):
        super().__init__()
        self.traffic = traffic

    def __torch_function__(
        self, func: Any, types: Any, args: Sequence[Any] = (), kwargs: Any = None
    ) -> Any:
        keywords = kwargs or {}
        name = getattr(func, "__name__", "")
        device = keywords.get("device")
        if name in FACTORIES and device is not None and torch.device(device).type != "cpu":
            self.traffic.uploads.append(name)
        if name in ("__getitem__", "__setitem__") and args[0].device.type != "cpu":
            index = args[1] if isinstance(args[1], tuple) else (args[1],)
            self.traffic.uploads += [name] * sum(isinstance(one, list) for one in index)
        return func(*args, **keywords)


class _Dispatches(TorchDispatchMode):
    def __init__(self, traffic: Traffic):
        super().__init__()
        self.traffic = traffic

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Sequence[Any] = (), kwargs: Any = None
    ) -> Any:
        keywords = kwargs or {}
        name = func._schema.name.removeprefix("aten::")
        found = func(*args, **keywords)
        before = {one.device.type for one in _tensors([*args, *keywords.values()])}
        after = {one.device.type for one in _tensors([found])}
        if (name in COPIES or "index" in name) and "cpu" in before and "cpu" not in after:
            self.traffic.uploads.append(name)
        elif before - {"cpu"} and (name in LOOKS or "cpu" in after):
            self.traffic.looks.append(name)
        is_copy = name in COPIES and before != after
        launches = is_copy or not (name in NO_KERNEL or _is_view(func))
        if launches and (before | after) - {"cpu"} and not self.traffic._replaying:
            self.traffic.operations[name] += 1
        return found


_CURRENT: list[Traffic] = []


def _is_view(func: Any) -> bool:
    return any(one.alias_info and not one.alias_info.is_write for one in func._schema.returns)


def _tensors(values: Sequence[Any]) -> Iterator[torch.Tensor]:
    for value in values:
        if isinstance(value, torch.Tensor):
            yield value
        elif isinstance(value, (list, tuple)):
            yield from _tensors(value)


class ReplayingGraph:
    """As a CUDA graph does: reads and writes the tensors it was captured with, whatever they hold
    by then."""

    def __init__(self, run: Callable[[], Any], output: Any):
        self.run, self.output = run, output

    def replay(self) -> None:
        for traffic in _CURRENT:
            traffic.operations["replay"] += 1
        if {one.device.type for one in _tensors([self.output])} == {"meta"}:
            return  # there are no values to make anew
        for traffic in _CURRENT:
            traffic._replaying = True
        again = self.run()
        for kept, new in zip(_tensors([self.output]), _tensors([again]), strict=True):
            kept.copy_(new)
        for traffic in _CURRENT:
            traffic._replaying = False


class StandInCapturer:
    """Refuses what a capture refuses: copies from the host, and looks at the device's values."""

    def __init__(self) -> None:
        self.captures = 0

    def capture(self, run: Callable[[], Any]) -> tuple[ReplayingGraph, Any]:
        self.captures += 1
        with Traffic().counted() as traffic:
            output = run()
        if traffic.uploads or traffic.looks:
            crossed = [*traffic.uploads, *traffic.looks]
            raise RuntimeError(f"operation not permitted when stream is capturing: {crossed}")
        return ReplayingGraph(run, output), output
