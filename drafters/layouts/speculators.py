"""The layout of the `speculators` library: one layer's configuration nested in the draft's."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

NESTED = "transformer_layer_config"
# What readers take for a key that is missing, where it is not false.
MISSING = {"eagle3": {"norm_before_residual": True}}


def flattened(values: Mapping[str, Any]) -> dict[str, Any]:
    """The keys of a config in this layout beside those of its layer, the draft's above the layer's.
    Another config stays as it is."""
    if NESTED not in values:
        return dict(values)
    defaults = MISSING.get(values.get("speculators_model_type", "eagle3"), {})
    return {**defaults, **values[NESTED], **values}


def renamed(name: str, names: Mapping[str, str]) -> str:
    """`names`: how a name begins -> how it begins then."""
    for old, new in names.items():
        if name.startswith(old):
            return new + name.removeprefix(old)
    return name
