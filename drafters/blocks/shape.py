"""Settings of a block drafter besides its layers, from options or a `config.json`."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

from draftsmith.errors import UserError


class BlockShape(NamedTuple):
    block_size: int  # slots of a whole block
    mask_token: int
    causal: bool  # whether a slot sees only those before it
    markov_rank: int = 0
    # what a confidence head reads: "state", "markov" (the transition's row too), or "" for none
    confidence: str = ""


def shape_in(values: Mapping[str, Any]) -> BlockShape:
    confidence = ""
    if values.get("enable_confidence_head"):
        confidence = "markov" if values.get("confidence_head_with_markov") else "state"
    rank = values.get("markov_rank") or 0
    return BlockShape(
        values["block_size"], values["mask_token_id"], bool(values.get("causal")), rank, confidence
    )


def check_block(values: Mapping[str, Any], folder: Path, *, from_anchor: bool) -> None:
    """`values`: the top level with `dflash_config` over it."""
    for key in ("block_size", "mask_token_id", "target_layer_ids"):
        if values.get(key) is None:
            raise UserError(f"draft {str(folder)!r} does not say its {key!r}; restore config.json")
    sliding = "sliding_attention" in (values.get("layer_types") or ())
    refused = {
        "use_swa": bool(values.get("use_swa")) or sliding,
        "attention_sink_bias": bool(values.get("attention_sink_bias")),
        "attention_value_scale": values.get("attention_value_scale") is not None,
        "mask_embedding.pt": (folder / "mask_embedding.pt").exists(),
        "sample_from_anchor": bool(values.get("sample_from_anchor", from_anchor)) != from_anchor,
    }
    for key, is_wrong in refused.items():
        if is_wrong:
            raise UserError(
                f"draft {str(folder)!r} has {key}={values.get(key)!r}, which draftsmith does not "
                "serve; use a draft without it"
            )
