"""States that a module keeps in attributes of its own."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

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
