"""Bytes that a piece of code holds at once, counted over the tensors that it makes."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves


class Memory(TorchDispatchMode):
    """Tensors made inside: bytes of the largest (`largest`), and of all that lived at once (`peak`).
    Tensors made before count nothing as long as no operation returns them."""

    def __init__(self) -> None:
        super().__init__()
        self.live = self.peak = self.largest = 0
        self._sizes: dict[int, int] = {}

    def __torch_dispatch__(
        self,
        func: Callable[..., Any],
        types: Sequence[type],
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        found = func(*args, **(kwargs or {}))
        before = {one.untyped_storage().data_ptr() for one in tensors(args)}
        for one in tensors(found):
            storage = one.untyped_storage()
            place, size = storage.data_ptr(), storage.nbytes()
            if size == 0 or place in self._sizes or place in before:
                continue
            self._sizes[place] = size
            self.live += size
            self.peak, self.largest = max(self.peak, self.live), max(self.largest, size)
            weakref.finalize(storage, self._freed, place)
        return found

    def _freed(self, place: int) -> None:
        self.live -= self._sizes.pop(place)


def tensors(tree: Any) -> list[torch.Tensor]:
    return [leaf for leaf in tree_leaves(tree) if isinstance(leaf, torch.Tensor)]


def memory_of(call: Callable[[], object]) -> Memory:
    with Memory() as memory:
        call()
    return memory
