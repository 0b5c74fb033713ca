"""The modules of a model that have a state, found by a pass that notes which of them write one."""

from __future__ import annotations

import copy
import inspect
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from transformers import DynamicCache, PreTrainedModel
from transformers.cache_utils import LinearAttentionCacheLayerMixin

from draftsmith.drafters.recurrent.cached import CachedStates
from draftsmith.drafters.recurrent.mixers import StateLayers, own_forward
from draftsmith.errors import UserError

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


@torch.no_grad()
def state_layers(model: PreTrainedModel) -> StateLayers:
    """The modules with a state, which read pieces from now on. None of them where the model's cache
    has no place for one."""
    found = StateLayers()
    try:
        cache = NotingCache(model)
    except (KeyError, AttributeError):
        # A layer type that transformers' cache has no class for.
        return found
    empty = copy.deepcopy(cache.layers)
    if not any(isinstance(layer, LinearAttentionCacheLayerMixin) for layer in empty):
        return found
    ids = torch.zeros(1, 2, dtype=torch.int64, device=model.device)
    with _noted(model, cache):
        model.base_model(
            **{"input_ids": ids, _cache_argument(model.base_model): cache}, use_cache=False
        )
    for module, layer in cache.writers.items():
        _check_steps(module)
        found.add(module, CachedStates(empty[layer], len(empty), _cache_argument(module)))
    return found


def _check_steps(module: torch.nn.Module) -> None:
    """Raises `UserError` for limits of the time step, which transformers applies to several tokens
    at once and not to a token alone."""
    limit = tuple(getattr(module, "time_step_limit", NO_LIMIT))
    if limit != NO_LIMIT:
        raise UserError(
            f"{type(module).__name__} limits its time steps to {limit} where it reads several "
            "tokens and not where it reads one, so drafts would change its text; use another model"
        )


def _cache_argument(module: torch.nn.Module) -> str:
    names = inspect.signature(own_forward(module)).parameters
    return next(name for name in ("cache_params", "past_key_values") if name in names)


@contextmanager
def _noted(model: PreTrainedModel, cache: NotingCache) -> Iterator[None]:
    """Keeps `cache.running` in step with the pass."""

    def begin(module: torch.nn.Module, inputs: Any) -> None:
        cache.running.append(module)

    def end(module: torch.nn.Module, inputs: Any, output: Any) -> None:
        cache.running.pop()

    handles = []
    for module in model.modules():
        handles += [module.register_forward_pre_hook(begin), module.register_forward_hook(end)]
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()
