"""Rotary embedding of a draft's own layers."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

import torch
from torch import nn

if TYPE_CHECKING:
    from typing_extensions import Self


class HasRotary(nn.Module):
    """Base of modules that rotate queries and keys. The frequencies are on the module's device, in
    float32 whatever it is cast to (rounded, they would move every position), and not in its state
    dict."""

    _rotary: tuple[nn.Module, ...] = ()  # a tuple keeps it out of the module's parts

    def _apply(self, fn: Callable[[torch.Tensor], torch.Tensor], recurse: bool = True) -> Self:
        super()._apply(fn, recurse)
        for rotary in self._rotary:
            rotary._apply(lambda tensor: tensor.to(fn(tensor).device))
        return self
