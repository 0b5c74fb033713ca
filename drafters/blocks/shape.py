"""Settings of a block drafter besides its layers, from options or a `config.json`, and the tables
that it may bring: a head over part of the vocabulary, embeddings, and an embedding of the mask
token alone."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

import torch

from draftsmith.drafters.draft_shape import SLIDING, Windows, windows_in
from draftsmith.drafters.init_from_target import MASK, check_map
from draftsmith.drafters.layouts.folder import flattened
from draftsmith.drafters.weights import load_pickled
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


MASK_FILE = "mask_embedding.pt"
# Copies of the target's, or what follows from other tensors.
LEFT_OUT = ("t2d", "verifier_norm.weight", "verifier_lm_head.weight")


def read_tables(
    folder: Path, values: Mapping[str, Any], tensors: Mapping[str, torch.Tensor]
) -> dict[str, torch.Tensor]:
    """`tensors` with the mask's embedding, where a file of its own holds it, and without copies
    that are not needed."""
    kept = {name: tensor for name, tensor in tensors.items() if name not in LEFT_OUT}
    full = values.get("draft_vocab_size") in (None, values.get("vocab_size"))
    if full:
        kept.pop("d2t", None)  # some trainers write the map of a full vocabulary too
    elif "d2t" in kept:
        check_map(kept["d2t"], values["draft_vocab_size"], values["vocab_size"], folder)
    head = kept.get("lm_head.weight")
    if head is not None and len(head) != values.get("vocab_size") and "d2t" not in kept:
        raise UserError(
            f"draft {str(folder)!r} has a head over {len(head)} tokens and no d2t that says which; "
            "restore its config.json and weights"
        )
    if (folder / MASK_FILE).is_file():
        kept[MASK] = mask_embedding(folder, values)
    return kept


def mask_embedding(folder: Path, values: Mapping[str, Any]) -> torch.Tensor:
    found = load_pickled(folder / MASK_FILE)
    if isinstance(found, dict):
        token, wanted = found.get("mask_token_id"), values.get("mask_token_id")
        if token is not None and token != wanted:
            raise UserError(
                f"{str(folder / MASK_FILE)!r} is of token {token}, config.json has "
                f"mask_token_id={wanted}; restore the folder"
            )
        found = found.get("embedding")
    if not isinstance(found, torch.Tensor):
        raise UserError(f"{str(folder / MASK_FILE)!r} holds no embedding; restore the file")
    return found.reshape(-1)
