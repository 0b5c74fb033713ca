"""Architectures that transformers builds as a causal LM.

A folder of another architecture is no draft LM: it would load, with random numbers where names
differ, or end in the middle of transformers.
"""

from __future__ import annotations

from collections.abc import Mapping
from itertools import chain
from typing import Any

from transformers import AutoConfig, AutoModelForCausalLM, Qwen2Config, Qwen2ForCausalLM
from transformers.models.auto.modeling_auto import (
    MODEL_FOR_CAUSAL_LM_MAPPING_NAMES,
    MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES,
)

from draftsmith.drafters.weights import architecture_of

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
