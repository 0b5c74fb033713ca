"""Weights of a target on a server, put into its outline: all but the layers at once, a layer when
it is asked for."""

from __future__ import annotations

import copy
import itertools
from collections.abc import Mapping, Sequence
from typing import overload

import torch
from torch import nn

from draftsmith.drafters.remote.connection import Connection
from draftsmith.errors import UserError


def fill(
    module: nn.Module,
    weights: Mapping[str, torch.Tensor],
    *,
    dtype: torch.dtype,
    device: torch.device,
    outside: str | None = None,
) -> None:
    """Puts the weights in the places of the module's own of the same names, tied ones too.
    Parameters whose names begin with `outside` may be missing."""
    held = itertools.chain(module.named_parameters(), module.named_buffers())
    found: dict[int, torch.Tensor] = {}
    for name, own in held:
        given = weights.get(name)
        if given is not None and given.shape == own.shape:
            found[id(own)] = given.to(device=device, dtype=dtype)
        elif isinstance(own, nn.Parameter) and (outside is None or not name.startswith(outside)):
            raise UserError(
                f"the target server has no {name!r} of shape {tuple(own.shape)}, which --target "
                "has; give --target the model that it serves"
            )
    for part in module.modules():
        for name, own in part._parameters.items():
            if own is not None and id(own) in found:
                part._parameters[name] = nn.Parameter(found[id(own)], requires_grad=False)
        for name, own in part._buffers.items():
            if own is not None and id(own) in found:
                part._buffers[name] = found[id(own)]


class LayersThere(Sequence[nn.Module]):
    """Layers of which each access gets the weights from the server, for as long as it is used."""

    def __init__(
        self,
        layers: nn.ModuleList,
        connection: Connection,
        *,
        dtype: torch.dtype,
        device: torch.device,
    ):
        self.layers, self.connection = layers, connection
        self.dtype, self.device = dtype, device

    def __len__(self) -> int:
        return len(self.layers)

    @overload
    def __getitem__(self, index: int) -> nn.Module: ...

    @overload
    def __getitem__(self, index: slice) -> Sequence[nn.Module]: ...

    def __getitem__(self, index: int | slice) -> nn.Module | Sequence[nn.Module]:
        if isinstance(index, slice):
            return [self[number] for number in range(*index.indices(len(self)))]
        number = range(len(self))[index]
        layer = copy.deepcopy(self.layers[number])
        fill(layer, self.connection.weights(number), dtype=self.dtype, device=self.device)
        return layer
