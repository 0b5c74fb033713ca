"""A folder with a draft before its family is known, and the layout of the `speculators` library:
one layer's configuration nested in the draft's.

A folder of an architecture that transformers does not build as a causal LM is no draft LM: it would
load, with random numbers where names differ, or end in the middle of transformers.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import cached_property
from itertools import chain
from pathlib import Path
from typing import Any

from transformers import AutoConfig, AutoModelForCausalLM, Qwen2Config, Qwen2ForCausalLM
from transformers.models.auto.modeling_auto import (
    MODEL_FOR_CAUSAL_LM_MAPPING_NAMES,
    MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES,
)

from draftsmith.drafters.weights import architecture_of, read_config, tensor_names


class DraftFolder:
    """`config` is that of the folder's `config.json`; tensors are named, not read."""

    def __init__(self, path: str | Path, config: Mapping[str, Any] | None = None):
        self.path = Path(path)
        self.config = read_config(self.path) if config is None else config

    @property
    def architecture(self) -> str:
        return architecture_of(self.config)

    @property
    def speculators_type(self) -> str | None:
        """The family under which the `speculators` library saved the draft; None in other
        layouts."""
        return self.config.get("speculators_model_type")

    @property
    def kind(self) -> str | None:
        """Name that trainers give beside an architecture that several kinds of drafts share."""
        own = (self.config.get("dflash_config") or {}).get("projector_type")
        return self.config.get("model_arch") or own

    @cached_property
    def names(self) -> frozenset[str]:
        """Tensors of the folder. Raises `UserError` for files that are missing or damaged."""
        return frozenset(tensor_names(self.path))


# A language model with eyes is stored under its whole name and built as its language model.
TABLES = (MODEL_FOR_CAUSAL_LM_MAPPING_NAMES, MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES)
MODEL_TYPES = frozenset(chain.from_iterable(TABLES))
# Older conversions write LLaMAForCausalLM.
ARCHITECTURES = frozenset(
    name.lower()
    for table in TABLES
    for names in table.values()
    for name in ((names,) if isinstance(names, str) else names)
)


def is_causal_lm(config: Mapping[str, Any]) -> bool:
    """True where transformers, or code that the folder brings, has a class for it."""
    if "AutoModelForCausalLM" in (config.get("auto_map") or {}):
        return True
    named = not config.get("architectures") or architecture_of(config).lower() in ARCHITECTURES
    return named and config.get("model_type") in MODEL_TYPES


class MiMoConfig(Qwen2Config):
    """MiMo-7B: Qwen2 under a name that transformers does not have, with MTP modules beside it. Its
    folder brings code of its own for that name, which need not run."""

    model_type = "mimo"


class MiMoForCausalLM(Qwen2ForCausalLM):
    config_class = MiMoConfig
    _keys_to_ignore_on_load_unexpected = (r"model\.mtp_layers\..*",)


def register_mimo() -> None:
    """Makes the name known to transformers; safe to call again."""
    AutoConfig.register("mimo", MiMoConfig, exist_ok=True)
    AutoModelForCausalLM.register(MiMoConfig, MiMoForCausalLM, exist_ok=True)


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
