"""Layers that stay in the host's memory or in a model's safetensors files, and are read for every
pass by accelerate's hooks."""

from __future__ import annotations

import logging
import re
from collections.abc import Iterable, Iterator
from contextlib import ExitStack, contextmanager

import torch
from transformers import PreTrainedModel
from transformers.conversion_mapping import get_model_conversion_mapping
from transformers.core_model_loading import WeightConverter

from draftsmith.drafters.target.taps import body_name, decoder_layers


def keep_needed_hooks(model: PreTrainedModel) -> PreTrainedModel:
    """The model with hooks on those modules alone whose weights are elsewhere: a hook binds a
    module's forward, and a copy of the head must run its own."""
    from accelerate.hooks import remove_hook_from_module
    from accelerate.utils import has_offloaded_params

    for module in model.modules():
        if hasattr(module, "_hf_hook") and not has_offloaded_params(module):
            remove_hook_from_module(module)
            vars(module).pop("forward", None)
    return model


@contextmanager
def weights_here(*modules: torch.nn.Module) -> Iterator[None]:
    """Holds the own weights of offloaded modules in memory meanwhile."""
    with ExitStack() as stack:
        for module in modules:
            if any(own.is_meta for own in module.parameters(recurse=False)):
                from accelerate.utils import align_module_device

                stack.enter_context(align_module_device(module))
        yield


def device_map(model: PreTrainedModel, device: str, layers_on: str) -> dict[str, str]:
    """Places by name, as transformers takes them: `layers_on` ("cpu" or "disk") of the decoder's
    layers, else `device`. The model may be on the meta device."""
    # accelerate warns of what was asked for.
    logging.getLogger("accelerate.big_modeling").setLevel(logging.ERROR)
    body = getattr(model, body_name(model))
    layers = decoder_layers(body, model.config.get_text_config().num_hidden_layers)
    name = next(name for name, module in model.named_modules() if module is layers)
    places, prefix, module = {name: layers_on}, "", model
    for part in name.split("."):
        own = [*module.named_parameters(recurse=False), *module.named_buffers(recurse=False)]
        beside = (other for other, _ in (*module.named_children(), *own) if other != part)
        places |= {f"{prefix}{other}": device for other in beside}
        module, prefix = getattr(module, part), f"{prefix}{part}."
    return places


def converts(layers: Iterable[torch.nn.Module], model: PreTrainedModel) -> bool:
    """True where transformers makes weights of these layers of other tensors in the files (experts,
    one by one there, are joined). The model may be on the meta device."""
    patterns = [
        re.compile(pattern.replace(r"\1", ".+"))
        for transform in get_model_conversion_mapping(model)
        if isinstance(transform, WeightConverter)
        for pattern in transform.target_patterns
    ]
    own = {id(one) for layer in layers for one in layer.parameters()}
    named = model.named_parameters(remove_duplicate=False)
    return any(pattern.search(key) for key, one in named if id(one) in own for pattern in patterns)
