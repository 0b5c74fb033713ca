"""Linear layers that read the same input, as one multiplication on a GPU.

Their weights lie one behind the other, and the model's parameters become views of that: no memory
is held twice, and whatever is written into a parameter counts at once.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import nn
from torch.nn.functional import linear


class JoinedLinear:
    """`weights` are `[out_i, in]` of one dtype, `biases` their `[out_i]` or None. The tensors stay
    the caller's objects, their memory becomes part of the joined one's. `refresh` joins anew what
    was given other memory since."""

    def __init__(self, weights: Sequence[torch.Tensor], biases: Sequence[torch.Tensor | None]):
        self.weights, self.biases = list(weights), list(biases)
        self.sizes = [len(weight) for weight in weights]
        self._weight = joined(self.weights)
        self._bias = self._joined_bias()

    def refresh(self) -> None:
        if not _follow(self.weights, self._weight):
            self._weight = joined(self.weights)
        given = [bias for bias in self.biases if bias is not None]
        if self._bias is not None and any(not _within(bias, self._bias) for bias in given):
            self._bias = self._joined_bias()

    @torch.inference_mode(False)
    def _joined_bias(self) -> torch.Tensor | None:
        if all(bias is None for bias in self.biases):
            return None
        whole = self._weight.new_zeros(len(self._weight))
        for part, bias in zip(whole.split(self.sizes), self.biases):
            if bias is not None:
                bias.data = part.copy_(bias.detach())
        return whole

    def __call__(self, rows: torch.Tensor) -> Sequence[torch.Tensor]:
        """[..., in] -> [..., out_i] of every weight, views of one tensor."""
        return torch.split_with_sizes(linear(rows, self._weight, self._bias), self.sizes, -1)


def joinable(weight: torch.Tensor) -> bool:
    """True for plain weights of numbers: no quantised, sharded or otherwise special tensor."""
    plain = type(weight) in (torch.Tensor, nn.Parameter)
    return plain and weight.ndim == 2 and weight.is_floating_point()


# Not as tensors of inference: parameters are written in place outside of it too.
@torch.inference_mode(False)
def joined(weights: Sequence[torch.Tensor]) -> torch.Tensor:
    """All rows of `weights` as one tensor, of which each becomes a view; nothing is copied where
    they lie one behind the other already."""
    first = weights[0].detach()
    shape = (sum(len(weight) for weight in weights), first.shape[1])
    end = first.storage_offset() + shape[0] * shape[1]
    if end * first.element_size() <= first.untyped_storage().nbytes():
        there = first.as_strided(shape, (shape[1], 1))
        if _follow(weights, there):
            return there
    whole = torch.cat([weight.detach() for weight in weights])
    begin = 0
    for weight in weights:
        weight.data = whole[begin : begin + len(weight)]
        begin += len(weight)
    return whole


def _follow(weights: Sequence[torch.Tensor], whole: torch.Tensor) -> bool:
    """True where the rows of `weights` are those of `whole`, in order, in its memory."""
    place = whole.data_ptr()
    for weight in weights:
        if weight.data_ptr() != place or not weight.is_contiguous():
            return False
        place += weight.numel() * weight.element_size()
    return True


def _within(part: torch.Tensor, whole: torch.Tensor) -> bool:
    return part.untyped_storage().data_ptr() == whole.untyped_storage().data_ptr()
