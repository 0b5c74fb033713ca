"""The Llama configuration of a feature head, taken from its target, and the same as engines write
it in `config.json`.

Sliding windows of its layers (a token sees so many positions, its own among them) stand there under
the names of vLLM and of the speculators layout: `layer_types` with "sliding_attention" for each
layer that has one, and `sliding_window` for its width.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any, TypeVar

import torch
from transformers import LlamaConfig, PreTrainedConfig

from draftsmith.drafters.target.attention import AttentionContext, register
from draftsmith.drafters.target.causal_lm import CausalLM
from draftsmith.errors import UserError
from draftsmith.kernels.attention.pool import Scoring

Config = TypeVar("Config", bound=PreTrainedConfig)
# Keys of a Llama config that engines read; `rope_theta` and `rope_scaling` are the names in all
# their versions.
SHAPE_KEYS = (
    "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads",
    "num_key_value_heads", "head_dim",
    "hidden_act", "rms_norm_eps", "max_position_embeddings", "vocab_size", "attention_bias",
)  # fmt: skip


CHOSEN = (
    "num_hidden_layers", "intermediate_size", "num_attention_heads", "num_key_value_heads",
    "head_dim",
)  # fmt: skip


def shape_of(target: CausalLM, options: object = None) -> dict[str, Any]:
    """Llama's names for the target's dimensions, but for those that the draft's `options` give;
    families that lack one get Llama's default for it."""
    given = {key: getattr(options, key, None) for key in CHOSEN}
    known = target.config.to_dict()
    hidden = target.hidden_size
    # Mamba has none: of a usual width.
    heads = known.get("num_attention_heads") or max(1, hidden // 64)
    return {
        "hidden_size": hidden,
        "intermediate_size": known.get("intermediate_size") or known.get("n_inner") or 4 * hidden,
        "num_hidden_layers": 1,
        "num_attention_heads": heads,
        "num_key_value_heads": known.get("num_key_value_heads") or heads,
        "head_dim": known.get("head_dim") or hidden // heads,
        "hidden_act": "silu",
        "rms_norm_eps": known.get("rms_norm_eps") or 1e-6,
        "max_position_embeddings": target.max_positions,
        "vocab_size": target.vocab_size,
        "attention_bias": False,
        **rope_of(known),
        **{key: value for key, value in given.items() if value is not None},
    }


def rope_of(config: dict[str, Any]) -> dict[str, Any]:
    """`rope_theta` and `rope_scaling`; a target with another scheme (per layer, partial, none)
    lends only its base. `config.json` files of before transformers 5 have these two keys."""
    older = {**(config.get("rope_scaling") or {}), "rope_theta": config.get("rope_theta")}
    parameters = dict(config.get("rope_parameters") or older)
    theta = parameters.pop("rope_theta", None) or 10000.0
    kind = parameters.get("rope_type", parameters.get("type", "default"))
    plain = kind == "default" or "partial_rotary_factor" in parameters
    return {"rope_theta": theta, "rope_scaling": None if plain else parameters}


def check_fits(
    values: Mapping[str, Any], expected: Mapping[str, Any], target: CausalLM, folder: Path
) -> None:
    """Raises `UserError` for the first of `expected` that the `config.json` values of a draft in
    `folder` do not have."""
    for key, wanted in expected.items():
        if (found := values.get(key)) != wanted:
            raise UserError(
                f"draft {str(folder)!r} has {key}={found!r} where {wanted!r} is needed for "
                f"{target.name!r}; use another draft"
            )


def llama_config(shape: dict[str, Any]) -> LlamaConfig:
    return layer_config(LlamaConfig, shape)


def layer_config(
    kind: type[Config], shape: dict[str, Any], more: dict[str, Any] | None = None
) -> Config:
    """Config of a decoder layer from `config.json` values, with our attention set, so that a
    context can own keys and values. `more`: keys that this kind has besides Llama's."""
    missing = [
        key for key in SHAPE_KEYS if key not in shape and key not in ("head_dim", "attention_bias")
    ]
    if missing:
        raise UserError(
            f"draft config lacks {missing[0]!r}; restore config.json or train the draft again"
        )
    check_heads(shape)
    wanted = {key: shape[key] for key in SHAPE_KEYS if key in shape} | (more or {})
    config = kind(
        **wanted, **rope_in(shape), tie_word_embeddings=False, bos_token_id=None, eos_token_id=None
    )
    config._attn_implementation = register()
    return config


def check_heads(shape: Mapping[str, Any]) -> None:
    """Raises `UserError` for attention that no draft can have."""
    heads, groups = shape["num_attention_heads"], shape["num_key_value_heads"] or 1
    if heads % groups:
        raise UserError(
            f"a draft cannot have num_attention_heads={heads} with num_key_value_heads={groups}; "
            "give a multiple of these"
        )
    width = shape.get("head_dim") or shape["hidden_size"] // heads
    if width % 2:
        raise UserError(
            f"a draft cannot have heads of head_dim={width}, since rotary embeddings turn pairs of "
            "numbers; give an even width"
        )


def rope_in(shape: dict[str, Any]) -> dict[str, Any]:
    """Arguments of a config class for the rotary embedding that `config.json` values describe.

    Sections of a vision model's are left out: a text's tokens have one position, whatever the
    section, so they turn nothing.
    """
    if shape.get("rope_parameters"):
        return {"rope_parameters": without_sections(shape["rope_parameters"])}
    scaling = without_sections(shape.get("rope_scaling") or {})
    kind = scaling.get("rope_type", scaling.get("type", "default"))
    return {
        "rope_theta": shape.get("rope_theta") or 10000.0,
        "rope_scaling": None if kind == "default" else scaling,
    }


def without_sections(rope: dict[str, Any]) -> dict[str, Any]:
    kept = {key: value for key, value in rope.items() if not key.startswith("mrope_")}
    return {key: "default" if value == "mrope" else value for key, value in kept.items()}


def config_dict(config: PreTrainedConfig) -> dict[str, Any]:
    """`config.json` values of the shape."""
    return {key: value for key, value in config.to_dict().items() if key in SHAPE_KEYS} | rope_of(
        config.to_dict()
    )


SLIDING, FULL = "sliding_attention", "full_attention"
Windows = tuple[int | None, ...]  # of each layer; empty: none has one


def new_windows(window: int | None, num_layers: int) -> Windows:
    """The same window for all layers of a new draft."""
    return () if window is None else (window,) * num_layers


def windows_in(values: Mapping[str, Any]) -> Windows:
    """Windows that `config.json` values describe. `sliding_window` alone says nothing: configs have
    it beside layers that see everything."""
    count = values["num_hidden_layers"]
    types = list(values.get("layer_types") or ())[:count]
    if SLIDING not in types:
        return ()
    window = values.get("sliding_window")
    if not window or window < 1:
        raise UserError(
            f"a draft with sliding attention has sliding_window={window!r}; restore config.json"
        )
    types += [FULL] * (count - len(types))
    return tuple(window if kind == SLIDING else None for kind in types)


def windows_config(windows: Windows) -> dict[str, Any]:
    """The inverse."""
    if not windows:
        return {}
    return {
        "layer_types": [FULL if window is None else SLIDING for window in windows],
        "sliding_window": max(window or 0 for window in windows),
    }


class WindowedContext:
    """An `AttentionContext` that gives every layer its window, for modules that have none."""

    def __init__(self, context: AttentionContext, windows: Windows):
        self.context, self.windows = context, windows

    def attend(
        self, layer: int, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, rule: Scoring
    ) -> torch.Tensor:
        rule = rule._replace(window=self.windows[layer])
        return self.context.attend(layer, query, key, value, rule)
