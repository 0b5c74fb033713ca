"""Settings of a block drafter besides its layers, from options or a `config.json`."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

from draftsmith.drafters.layouts.speculators import flattened
from draftsmith.drafters.windows import SLIDING, Windows, windows_in
from draftsmith.errors import UserError


class BlockShape(NamedTuple):
    block_size: int  # slots of a whole block
    mask_token: int
    causal: bool  # whether a slot sees only those before it, in layers without a window
    markov_rank: int = 0
    # what a confidence head reads: "state", "markov" (the transition's row too), or "" for none
    confidence: str = ""
    windows: Windows = ()
    causal_windows: bool = False  # the same as `causal`, in layers with a window

    def window(self, layer: int) -> int | None:
        return self.windows[layer] if self.windows else None

    def is_causal(self, layer: int) -> bool:
        return self.causal if self.window(layer) is None else self.causal_windows


def shape_in(values: Mapping[str, Any]) -> BlockShape:
    """`values` as `block_values` gives them."""
    confidence = ""
    if values.get("enable_confidence_head"):
        confidence = "markov" if values.get("confidence_head_with_markov") else "state"
    rank = values.get("markov_rank") or 0
    # Where a config does not say, only layers of the sliding kind are causal.
    causal = values.get("is_causal", values.get("causal"))
    sliding = SLIDING in (values.get("layer_types") or ())
    non_causal = values.get("sliding_window_non_causal", False)
    return BlockShape(
        values["block_size"],
        values["mask_token_id"],
        bool(causal),
        rank,
        confidence,
        block_windows(values),
        sliding and not non_causal if causal is None else bool(causal),
    )


def block_windows(values: Mapping[str, Any]) -> Windows:
    types = list(values.get("layer_types") or ())
    if values.get("use_swa") and SLIDING not in types:
        types = [SLIDING] * values["num_hidden_layers"]
    window = values.get("swa_window_size") or values.get("sliding_window")
    windows = windows_in({**values, "layer_types": types, "sliding_window": window})
    if windows and window < values["block_size"]:
        raise UserError(
            f"a draft with sliding attention has sliding_window={window!r}, where its block of "
            f"{values['block_size']} must fit in; restore config.json"
        )
    return windows


def block_values(config: Mapping[str, Any]) -> dict[str, Any]:
    """The keys of a block's config at one level, `target_layer_ids` counted by outputs, whatever
    layout they come in."""
    values = flattened(config) | dict(config.get("dflash_config") or {})
    if (raw := values.get("aux_hidden_state_layer_ids")) is not None:
        values.setdefault("target_layer_ids", [layer - 1 for layer in raw])
        values.setdefault("sliding_window_non_causal", True)  # layers without a window are never
    return values


def check_block(values: Mapping[str, Any], folder: Path, *, from_anchor: bool) -> None:
    """`values` as `block_values` gives them."""
    for key in ("block_size", "mask_token_id", "target_layer_ids"):
        if values.get(key) is None:
            raise UserError(f"draft {str(folder)!r} does not say its {key!r}; restore config.json")
    refused = {
        "attention_sink_bias": bool(values.get("attention_sink_bias")),
        "attention_value_scale": values.get("attention_value_scale") is not None,
        "is_neox_style": not values.get("is_neox_style", True),
        "markov_head_type": values.get("markov_head_type", "vanilla") != "vanilla",
        "sample_from_anchor": bool(values.get("sample_from_anchor", from_anchor)) != from_anchor,
    }
    for key, is_wrong in refused.items():
        if is_wrong:
            raise UserError(
                f"draft {str(folder)!r} has {key}={values.get(key)!r}, which draftsmith does not "
                "serve; use a draft without it"
            )
