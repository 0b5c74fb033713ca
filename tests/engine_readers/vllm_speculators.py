"""vLLM's reading of the `speculators` layout: the layer's config is taken for the draft's, and the
keys of each family are put over it from the top level."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from draftsmith.drafters.weights import read_config, read_weights
from tests.engine_readers.understood import Understood
from tests.engine_readers.vllm import block_from

COPIED = (
    "mask_token_id",
    "markov_rank",
    "markov_head_type",
    "block_size",
    "enable_confidence_head",
    "confidence_head_with_markov",
)


def layer_of(outer: dict[str, Any], kind: str) -> dict[str, Any]:
    plan = outer.get("speculators_config") or {}
    methods = plan.get("proposal_methods") or [{}]
    assert methods[0].get("speculative_tokens") and (plan.get("verifier") or {}).get("name_or_path")
    assert outer.get("speculators_model_type") == kind
    return dict(outer["transformer_layer_config"])


def read_dflash(folder: Path, target_config: dict[str, Any]) -> Understood:
    outer = read_config(folder)
    taps = outer["aux_hidden_state_layer_ids"]
    block = {
        "mask_token_id": outer["mask_token_id"],
        "target_layer_ids": [tap - 1 for tap in taps],
        "sample_from_anchor": outer.get("sample_from_anchor", False),
        "causal": not outer.get("sliding_window_non_causal", True),
    }
    config = layer_of(outer, "dflash") | {
        "architectures": ["DFlashDraftModel"],
        "eagle_aux_hidden_state_layer_ids": taps,
        # The runner drafts as many as it is asked for; our own reader asks for the size.
        "block_size": outer["block_size"],
        "dflash_config": block,
    }
    return block_from(config, read_weights(folder), target_config)


def read_dspark(folder: Path, target_config: dict[str, Any]) -> Understood:
    """Its slots always see all of their block."""
    outer = read_config(folder)
    taps = outer["aux_hidden_state_layer_ids"]
    assert outer.get("sample_from_anchor", False)
    config = layer_of(outer, "dspark") | {key: outer[key] for key in COPIED if key in outer}
    config |= {
        "architectures": ["Qwen3DSparkModel"],
        "eagle_aux_hidden_state_layer_ids": taps,
        "target_layer_ids": [tap - 1 for tap in taps],
        "sample_from_anchor": True,
    }
    return block_from(config, read_weights(folder), target_config)
