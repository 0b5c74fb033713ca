"""States of many texts in slots, layer by layer."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch


class StateShape(NamedTuple):
    """One tensor of a layer's state, without its batch dimension."""

    shape: tuple[int, ...]
    dtype: torch.dtype

    @property
    def num_bytes(self) -> int:
        return torch.Size(self.shape).numel() * self.dtype.itemsize


StateShapes = dict[Any, StateShape]  # by the name of the tensor


class StateSlots:
    """`num_slots` states of every layer; a slot holds nothing of use until it was written.

    Args:
        shapes: of each layer's state.
    """

    def __init__(self, shapes: list[StateShapes], num_slots: int, device: torch.device):
        self.num_slots = num_slots
        self.layers: list[dict[Any, torch.Tensor]] = [
            {
                name: torch.zeros(num_slots, *one.shape, dtype=one.dtype, device=device)
                for name, one in layer.items()
            }
            for layer in shapes
        ]

    def read(self, layer: int, slots: torch.Tensor) -> dict[Any, torch.Tensor]:
        """Copies [n, ...], which a layer may write into."""
        return {name: states.index_select(0, slots) for name, states in self.layers[layer].items()}

    def write(self, layer: int, slots: torch.Tensor, states: dict[Any, torch.Tensor]) -> None:
        for name, kept in self.layers[layer].items():
            kept.index_copy_(0, slots, states[name].to(kept.dtype))


class NotedStates:
    """One text's states of every layer, as they come: gives the shapes that slots are made for."""

    def __init__(self) -> None:
        self.states: dict[int, dict[Any, torch.Tensor]] = {}

    def read(self, layer: int, slots: torch.Tensor) -> dict[Any, torch.Tensor]:
        return {name: state.clone() for name, state in self.states[layer].items()}

    def write(self, layer: int, slots: torch.Tensor, states: dict[Any, torch.Tensor]) -> None:
        self.states[layer] = states

    def shapes(self) -> list[StateShapes]:
        return [
            {
                name: StateShape(tuple(state.shape[1:]), state.dtype)
                for name, state in self.states[layer].items()
            }
            for layer in sorted(self.states)
        ]
