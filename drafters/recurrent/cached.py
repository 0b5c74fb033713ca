"""States that a module keeps in its layer of transformers' cache."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import torch
from transformers.cache_utils import Cache, LinearAttentionCacheLayerMixin


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
