"""A module with a state, which reads a pass piece by piece. The module's own code is unchanged."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, Protocol

import torch

from draftsmith.drafters.recurrent.kept import KeptState, num_kept
from draftsmith.drafters.recurrent.pieces import PieceGroup, RowRead, Split
from draftsmith.drafters.recurrent.slots import StateShapes, StateSlots


class RunningState(Protocol):
    """The place where a module keeps its state."""

    def call(
        self,
        forward: Callable[..., Any],
        inputs: dict[str, Any],
        states: dict[Any, torch.Tensor] | None,
    ) -> tuple[Any, dict[Any, torch.Tensor]]: ...


class StateLayers:
    """All modules of a model that have a state. Without any it does nothing."""

    def __init__(self) -> None:
        self.mixers: list[Mixer] = []
        self.shapes: list[StateShapes] = []
        # Some modules forget their state where several tokens follow it: they read one at a time.
        self.one_by_one = False
        # Others compute something else for a single token after their state.
        self.no_single = False
        self.is_reading = False
        self.split: Split | None = None

    def __bool__(self) -> bool:
        return bool(self.mixers)

    def add(self, module: torch.nn.Module, kept: RunningState) -> None:
        """Puts a `Mixer` in the place of the module's forward."""
        mixer = Mixer(self, len(self.mixers), own_forward(module), kept)
        self.mixers.append(mixer)
        module.forward = mixer

    @contextmanager
    def reading(self, context: Any) -> Iterator[None]:
        """A forward pass over the texts of `context`, whose `split` says where each begins; None
        there is one text a row, from its beginning."""
        if not self.mixers:
            yield
            return
        self.is_reading, self.split = True, context.split
        try:
            yield
        finally:
            self.is_reading, self.split = False, None

    def row_read(
        self, owner: int, kept: KeptState, begin: int, num_known: int, num_drafted: int
    ) -> RowRead:
        """The share of text number `owner` of a round, which begins at position `begin`."""
        is_start = begin == 0
        count = num_kept(num_known, num_drafted, is_start=is_start, no_single=self.no_single)
        return RowRead(owner, kept, is_start, num_known, count, num_drafted)

    @property
    def num_bytes(self) -> int:
        """Bytes of one text's state."""
        return sum(one.num_bytes for layer in self.shapes for one in layer.values())

    def new_slots(self, num_slots: int, device: torch.device) -> StateSlots:
        return StateSlots(self.shapes, num_slots, device)


class Mixer:
    """Stands in the place of a module's forward. Outside `StateLayers.reading` it is that."""

    def __init__(
        self, layers: StateLayers, index: int, forward: Callable[..., Any], kept: RunningState
    ):
        self.layers, self.index, self.forward, self.kept = layers, index, forward, kept
        self.parameters = tuple(inspect.signature(forward).parameters)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if not self.layers.is_reading:
            return self.forward(*args, **kwargs)
        inputs = {**dict(zip(self.parameters, args)), **kwargs}
        if "attention_mask" in inputs:
            inputs["attention_mask"] = None  # no piece has padding
        split = self.layers.split
        if split is None:
            return self.forward(**inputs)
        shape = inputs[self.parameters[0]].shape[:2]
        joined: torch.Tensor | None = None
        for group in split.groups:
            output = self._read(group, inputs, shape, split)
            is_tuple = isinstance(output, tuple)
            states = output[0] if is_tuple else output
            if joined is None:
                joined = states.new_zeros(*shape, *states.shape[2:])
            joined[group.rows, group.columns] = states
        return (joined, *(None for _ in output[1:])) if is_tuple else joined

    def _read(
        self, group: PieceGroup, inputs: dict[str, Any], shape: torch.Size, split: Split
    ) -> Any:
        """The module's output for the pieces of a group, [n, c, ...]."""
        states: dict[Any, torch.Tensor] | None = None
        if group.sources is not None and split.states is not None:
            states = split.states.read(self.index, group.sources)
        num_columns = group.columns.shape[1]
        step = 1 if self.layers.one_by_one and states is not None else num_columns
        outputs = []
        for begin in range(0, num_columns, step):
            at = (group.rows, group.columns[:, begin : begin + step])
            part = {name: _part(value, shape, at) for name, value in inputs.items()}
            output, states = self.kept.call(self.forward, part, states)
            outputs.append(output)
        if group.targets is not None and split.states is not None and states is not None:
            split.states.write(self.index, group.targets, states)
        return outputs[0] if len(outputs) == 1 else _concatenated(outputs)


def own_forward(module: torch.nn.Module) -> Callable[..., Any]:
    """The module's forward without a `Mixer` in its place."""
    forward = module.forward
    return forward.forward if isinstance(forward, Mixer) else forward


def _part(value: Any, shape: torch.Size, at: tuple[torch.Tensor, torch.Tensor]) -> Any:
    """Entries of the tokens `at`, of a value that has one for each token of the pass; any other
    value as it is."""
    if isinstance(value, torch.Tensor) and value.shape[:2] == shape:
        return value[at]
    if type(value) is tuple:
        return tuple(_part(one, shape, at) for one in value)
    return value


def _concatenated(outputs: list[Any]) -> Any:
    if isinstance(outputs[0], tuple):
        return (torch.cat([output[0] for output in outputs], dim=1), *outputs[0][1:])
    return torch.cat(outputs, dim=1)
