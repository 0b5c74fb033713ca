"""The modules of a model that have a state, found by a pass that notes which of them write one."""

from __future__ import annotations

import copy
import inspect
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from transformers import DynamicCache, PreTrainedConfig, PreTrainedModel
from transformers.cache_utils import LinearAttentionCacheLayerMixin

from draftsmith.drafters.recurrent.attributes import AttributeStates
from draftsmith.drafters.recurrent.cached import CachedStates
from draftsmith.drafters.recurrent.mixers import StateLayers, own_forward

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
