"""Feature heads and block drafters for vLLM and SGLang: the portable checkpoint, once it is known
to mean the same to both.

The two read the tapped layers from different keys with different meanings, ignore unknown names
(SGLang) or refuse them (vLLM), and take the taps in layer order whatever the config says: a draft
that breaks a rule is served without complaint and accepts nothing.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

import torch

from draftsmith.drafters.heads.eagle1 import ARCHITECTURES as EAGLE1
from draftsmith.drafters.heads.layer_kinds import LLAMA
from draftsmith.drafters.init_from_target import shares_embeddings
from draftsmith.drafters.weights import write_weights
from draftsmith.errors import UserError
from draftsmith.train.export.layouts.source import ExportSource, check_sees_all

OWN_TABLES = ("lm_head.weight", "embed_tokens.weight", "d2t", "mask_embedding")


def write_eagle3(source: ExportSource, out: Path) -> None:
    """P-EAGLE's too, which vLLM serves with `"method": "eagle3", "parallel_drafting": true`."""
    check_eagle3(source)
    write_portable(source, out)


def write_sglang_eagle3(source: ExportSource, out: Path) -> None:
    if source.drafter.norms.norm_before_residual:
        raise UserError(
            "the draft has norm_before_residual=true, which SGLang cannot express; export it --to "
            "vllm"
        )
    if (layers := source.drafter.config.num_hidden_layers) != 1:
        raise UserError(
            f"the draft has num_hidden_layers={layers}, and SGLang norms later layers in its own "
            "way; export it --to vllm"
        )
    check_sees_all(source, "SGLang")
    write_eagle3(source, out)


def write_block(source: ExportSource, out: Path) -> None:
    check_block(source)
    write_portable(source, out)


def write_vllm_eagle1(source: ExportSource, out: Path) -> None:
    """Its projection has no bias."""
    # Its layer counts behind the target's, past the end of the draft's own kinds.
    config, tensors = eagle1(source, "vLLM's EAGLE-1")
    bias = tensors.pop("fc.bias", None)
    if bias is not None and bool(bias.any()):
        raise UserError(
            "the draft's fc has a bias, which vLLM's EAGLE-1 cannot express; export it --to sglang"
        )
    write_weights(out, config | {"architectures": [EAGLE1[0]], "bias": False}, tensors)


def write_sglang_eagle1(source: ExportSource, out: Path) -> None:
    """Its projection has a bias."""
    config, tensors = eagle1(source, "SGLang")
    tensors.setdefault("fc.bias", torch.zeros_like(tensors["fc.weight"][:, 0]))
    write_weights(out, config | {"architectures": [EAGLE1[1]], "bias": True}, tensors)


def eagle1(source: ExportSource, engine: str) -> tuple[dict[str, Any], dict[str, torch.Tensor]]:
    check_sees_all(source, engine)
    if source.drafter.has_layernorms:
        raise UserError(
            f"the draft has layernorms=True, norms that {engine} has not; export it --to "
            "speculators"
        )
    check_layer(source)
    return source.drafter.portable_config(), source.drafter.state_dict()


def write_portable(source: ExportSource, out: Path) -> None:
    write_weights(out, source.drafter.portable_config(), source.drafter.state_dict())


def check_eagle3(source: ExportSource) -> None:
    architecture = source.drafter.portable_config()["architectures"][0]
    if architecture != LLAMA.architecture:
        raise UserError(
            f"architecture {architecture!r} is not the portable EAGLE-3 one ({LLAMA.architecture})"
        )
    check_layer(source)
    check_taps(source)


def check_block(source: ExportSource) -> None:
    if found := [name for name in OWN_TABLES if name in source.drafter.state_dict()]:
        raise UserError(
            f"weight {found[0]!r} has no place in the {source.family} layout; remove it"
        )
    check_layer(source)
    check_taps(source)


def check_layer(source: ExportSource) -> None:
    """A layer without biases, over embeddings that engines share with the target as they are."""
    if source.drafter.config.attention_bias:
        raise UserError(
            "the draft has attention_bias=True, which draftsmith does not export; train it without"
        )
    if source.drafter.embed_tokens is None and not shares_embeddings(source.outline):
        raise UserError(
            f"{source.target_name!r} scales its token embeddings, which engines do not do for a "
            "draft that shares them; save the draft with embeddings of its own"
        )


def check_taps(source: ExportSource) -> None:
    taps, most = list(source.drafter.taps), source.outline.num_layers - 1
    if taps != sorted(set(taps)) or taps[0] < 1 or taps[-1] > most:
        raise UserError(
            f"the draft taps layers {taps}; engines hand ascending ones from 1 to {most} over, so "
            "train with such"
        )


NUM_TAPS = 3


class Reader(NamedTuple):
    """An engine with a graph of its own for the head: one layer and `NUM_TAPS` taps. What such a
    graph leaves out is refused: the engine would draft without it and say nothing.

    Args:
        passes_over: settings that it ignores, with the draft that it would run instead.
        single: why it has one layer.
    """

    engine: str
    passes_over: Mapping[str, str]
    single: str


def check_represented(config: dict[str, Any], reader: Reader) -> None:
    """Raises `UserError` where `reader` would run another draft than `config` describes."""
    for key, instead in reader.passes_over.items():
        if config.get(key):
            raise UserError(
                f"the draft has {key}=true, which {reader.engine} passes over: {instead}; train it "
                f"with eagle3.{key}=false"
            )
    taps = config["eagle_aux_hidden_state_layer_ids"]
    if len(taps) != NUM_TAPS:
        raise UserError(
            f"the draft taps layers {taps}, and {reader.engine} reads exactly {NUM_TAPS}; train it "
            "with eagle3.taps of three layers"
        )
    if config["num_hidden_layers"] != 1:
        raise UserError(
            f"the draft has num_hidden_layers={config['num_hidden_layers']}, and {reader.engine} "
            f"{reader.single}; export it --to vllm"
        )
