"""Modules with a state, each reading a pass text by text, from its own state; found by a pass that
notes which of them write one. The modules' own code is unchanged."""

from __future__ import annotations

import copy
import inspect
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, Protocol

import torch
from transformers import DynamicCache, PreTrainedConfig, PreTrainedModel
from transformers.cache_utils import Cache, LinearAttentionCacheLayerMixin

from draftsmith.drafters.quirks.kept_state import KeptState, num_kept
from draftsmith.drafters.quirks.recurrent_states import (
    PieceGroup,
    RowRead,
    Split,
    StateShapes,
    StateSlots,
)


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


# Paths from the module; the first is what it is found by.
KEPT = (("conv1d_state", "rg_lru.recurrent_states"),)  # Griffin


class AttributeStates:
    """Calls of a module with a state put into its attributes and taken out again."""

    def __init__(self, module: torch.nn.Module, names: tuple[str, ...]):
        self.places = [
            (module.get_submodule(owner), name)
            for owner, _, name in (path.rpartition(".") for path in names)
        ]

    @classmethod
    def of(cls, module: torch.nn.Module) -> AttributeStates | None:
        """None for a module without such attributes."""
        for names in KEPT:
            if hasattr(module, names[0]):
                return cls(module, names)
        return None

    def call(
        self,
        forward: Callable[..., Any],
        inputs: dict[str, Any],
        states: dict[Any, torch.Tensor] | None,
    ) -> tuple[Any, dict[Any, torch.Tensor]]:
        """As `CachedStates.call`."""
        for index, (module, name) in enumerate(self.places):
            setattr(module, name, None if states is None else states[index])
        output = forward(**{**inputs, "use_cache": True})
        found = {}
        for index, (module, name) in enumerate(self.places):
            found[index] = getattr(module, name)
            setattr(module, name, None)
        return output, found


class OneLayerCache(Cache):
    """A cache in which every layer is the same one: the module that gets it has one layer alone."""

    def __init__(self, layer: LinearAttentionCacheLayerMixin, num_layers: int):
        super().__init__(layers=[layer] * num_layers)
        self.linear: torch.Tensor | None = None

    # MiniMax's lightning attention keeps its state by these two.
    def get_linear_cache(self, layer_idx: int) -> torch.Tensor | None:
        return self.linear

    def set_linear_cache(self, layer_idx: int, linear_cache: torch.Tensor) -> None:
        self.linear = linear_cache


class CachedStates:
    """Calls of a module with a state put into its cache and taken out again.

    Args:
        layer: the module's cache layer, empty.
        argument: name of the module's argument that takes the cache.
    """

    def __init__(self, layer: LinearAttentionCacheLayerMixin, num_layers: int, argument: str):
        self.layer, self.num_layers, self.argument = layer, num_layers, argument

    def call(
        self,
        forward: Callable[..., Any],
        inputs: dict[str, Any],
        states: dict[Any, torch.Tensor] | None,
    ) -> tuple[Any, dict[Any, torch.Tensor]]:
        """The module's output and the states after it. `states` None: the text begins here. They
        may be written into."""
        cache = OneLayerCache(copy.deepcopy(self.layer), self.num_layers)
        if states is not None:
            _fill(cache, states)
        output = forward(**{**inputs, self.argument: cache})
        return output, _found(cache)


def _fill(cache: OneLayerCache, states: dict[Any, torch.Tensor]) -> None:
    layer = cache.layers[0]
    for (kind, index), state in states.items():
        if kind == "linear":
            cache.linear = state
            continue
        if kind == "conv":
            layer.conv_states[index] = state
            layer.conv_kernel_size[index] = state.shape[-1]
            layer.is_conv_states_initialized[index] = True
        else:
            layer.recurrent_states[index] = state
            layer.is_recurrent_states_initialized[index] = True
        layer.has_previous_state[index] = True
        layer.device, layer.dtype = state.device, state.dtype


def _found(cache: OneLayerCache) -> dict[Any, torch.Tensor]:
    layer = cache.layers[0]
    found = {("conv", index): state for index, state in layer.conv_states.items()}
    found |= {("recurrent", index): state for index, state in layer.recurrent_states.items()}
    found["linear", 0] = cache.linear
    return {name: state for name, state in found.items() if state is not None}


NO_LIMIT = (0.0, float("inf"))


class NotingCache(DynamicCache):
    """Notes the innermost module that runs when a state is written, and its layer."""

    def __init__(self, model: PreTrainedModel):
        super().__init__(config=model.config)
        self.running: list[torch.nn.Module] = []
        self.writers: dict[torch.nn.Module, int] = {}
        self.linear: dict[int, torch.Tensor] = {}

    def update_conv_state(self, states: torch.Tensor, layer_idx: int, **options: Any) -> Any:
        self.writers[self.running[-1]] = layer_idx
        return super().update_conv_state(states, layer_idx, **options)

    def update_recurrent_state(self, states: torch.Tensor, layer_idx: int, **options: Any) -> Any:
        self.writers[self.running[-1]] = layer_idx
        return super().update_recurrent_state(states, layer_idx, **options)

    def get_linear_cache(self, layer_idx: int) -> torch.Tensor | None:
        return self.linear.get(layer_idx)

    def set_linear_cache(self, layer_idx: int, linear_cache: torch.Tensor) -> None:
        self.writers[self.running[-1]] = layer_idx
        self.linear[layer_idx] = linear_cache


def keeps_states(config: PreTrainedConfig) -> bool:
    """True where transformers' cache of such a model has layers with a state. False where the cache
    has no place for one."""
    try:
        layers = DynamicCache(config=config).layers
    except (KeyError, AttributeError):
        # A layer type that transformers' cache has no class for.
        return False
    return any(isinstance(layer, LinearAttentionCacheLayerMixin) for layer in layers)


@torch.no_grad()
def state_layers(model: PreTrainedModel, body: torch.nn.Module) -> StateLayers:
    """The modules with a state, which read pieces from now on. None of them where the model's cache
    has no place for one."""
    found = StateLayers()
    if not keeps_states(model.config):
        return found
    cache = NotingCache(model)
    empty = copy.deepcopy(cache.layers)
    ids = torch.zeros(1, 2, dtype=torch.int64, device=model.device)
    with _noted(body, cache):
        body(**{"input_ids": ids, _cache_argument(body): cache}, use_cache=False)
    for module, layer in cache.writers.items():
        # transformers limits the time steps of several tokens, and not that of a single one.
        found.no_single |= tuple(getattr(module, "time_step_limit", NO_LIMIT)) != NO_LIMIT
        found.add(module, CachedStates(empty[layer], len(empty), _cache_argument(module)))
    for module in body.modules():
        if (kept := AttributeStates.of(module)) is not None:
            found.add(module, kept)
    return found


def _cache_argument(module: torch.nn.Module) -> str:
    names = inspect.signature(own_forward(module)).parameters
    return next(name for name in ("cache_params", "past_key_values") if name in names)


@contextmanager
def _noted(body: torch.nn.Module, cache: NotingCache) -> Iterator[None]:
    """Keeps `cache.running` in step with the pass."""

    def begin(module: torch.nn.Module, inputs: Any) -> None:
        cache.running.append(module)

    def end(module: torch.nn.Module, inputs: Any, output: Any) -> None:
        cache.running.pop()

    handles = []
    for module in body.modules():
        handles += [module.register_forward_pre_hook(begin), module.register_forward_hook(end)]
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()
