"""accelerate's hooks on the modules whose weights are elsewhere."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import TYPE_CHECKING

import torch
from transformers import PreTrainedModel

if TYPE_CHECKING:
    from accelerate.utils.offload import PrefixedDataset


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


def weights_of_hooks(model: PreTrainedModel) -> Iterator[PrefixedDataset]:
    """Mappings, one per hook, from which offloaded weights are read."""
    for module in model.modules():
        hook = getattr(module, "_hf_hook", None)
        for one in getattr(hook, "hooks", (hook,)):
            weights = getattr(one, "weights_map", None)
            if weights is not None:
                yield weights


@contextmanager
def weights_here(*modules: torch.nn.Module) -> Iterator[None]:
    """Holds the own weights of offloaded modules in memory meanwhile."""
    with ExitStack() as stack:
        for module in modules:
            if any(own.is_meta for own in module.parameters(recurse=False)):
                from accelerate.utils import align_module_device

                stack.enter_context(align_module_device(module))
        yield
