"""The layout of the `speculators` library, which names the target: `vllm serve OUT` starts it where
vLLM reads the type."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import torch

from draftsmith.drafters.draft_shape import rope_of
from draftsmith.drafters.heads.mtp_deepseek import stacked_experts
from draftsmith.drafters.heads.mtp_layouts import (
    SPECULATORS,
    layout_of,
    module_tensors,
    own_names,
    text_values,
)
from draftsmith.drafters.layouts.folder import NESTED, renamed
from draftsmith.drafters.weights import write_weights
from draftsmith.errors import UserError
from draftsmith.train.export import portable
from draftsmith.train.export.mtp import check_kind
from draftsmith.train.export.source import ExportSource, check_sees_all, target_tensor, text_config

# Kinds of targets that the library makes an MTP module's layer of.
MTP_KINDS = ("qwen3", "qwen3_next", "qwen3_5_text", "qwen3_5_moe_text")
EMBEDDINGS = "embed_tokens.weight"


class Kind(NamedTuple):
    """A type of the library. Keys of the portable config that are neither `left_out` nor `dtype`
    are the layer's."""

    type: str
    architectures: tuple[str, ...]
    check: Callable[[ExportSource], None]
    keys: Callable[[dict[str, Any]], dict[str, Any]]  # portable config -> keys beside the layer's
    names: Mapping[str, str] = {}  # how names begin -> the same there
    left_out: tuple[str, ...] = ()
    shared: tuple[str, ...] = ()  # tensors that the library takes from the target


def write_speculators(source: ExportSource, out: Path) -> None:
    kind = KINDS[source.family]
    kind.check(source)
    config = source.drafter.portable_config()
    outer = ("architectures", "dtype", *kind.left_out)
    layer = {key: value for key, value in config.items() if key not in outer}
    written = header(source, kind.type, kind.architectures, config["dtype"])
    tensors = {
        renamed(name, kind.names): tensor
        for name, tensor in source.drafter.state_dict().items()
        if name not in kind.shared
    }
    write_weights(out, written | kind.keys(config) | {NESTED: layer}, tensors)


def write_mtp(source: ExportSource, out: Path) -> None:
    """A module by itself, with embeddings and head that the library takes from the target."""
    values, layout = text_values(source.config), layout_of(source.config)
    kind, target = values.get("model_type"), text_config(source.target_config)
    if layout is None or kind not in MTP_KINDS:
        raise UserError(
            f"the speculators library has MTP modules of the layers of {', '.join(MTP_KINDS)}, and "
            f"the draft's is a layer of {kind!r}; export this mtp draft --to vllm"
        )
    check_kind(source)
    prefix = layout.prefix_for(values)
    published = module_tensors(source.draft, values, prefix, needed=layout.needed)
    tensors = stacked_experts(own_names(published, layout), str(source.draft))
    dtype = str(next(iter(tensors.values())).dtype).removeprefix("torch.")
    config = header(source, "mtp", ("MTPDraftModel",), dtype, version="0.6.0")
    config |= {"num_nextn_predict_layers": 1, NESTED: target}
    prefix, name_of = SPECULATORS.prefix_for(target), SPECULATORS.published_name
    write_weights(out, config, {prefix + name_of(name): one for name, one in tensors.items()})


def header(
    source: ExportSource,
    kind: str,
    architectures: tuple[str, ...],
    dtype: str,
    *,
    version: str = "0.5.0",
) -> dict[str, Any]:
    """Keys of all types; draft length and target stand inside."""
    method = {"proposal_type": "greedy", "speculative_tokens": source.num_speculative_tokens}
    return {
        "architectures": list(architectures),
        "speculators_model_type": kind,
        "speculators_version": version,
        "dtype": dtype,
        "tie_word_embeddings": False,
        "speculators_config": {
            "algorithm": kind,
            "default_proposal_method": "greedy",
            "proposal_methods": [method],
            "verifier": {
                "name_or_path": source.target_name,
                "architectures": source.target_config["architectures"],
            },
        },
    }


def eagle3_keys(config: dict[str, Any]) -> dict[str, Any]:
    # Norms are written out even if false: a reader takes a missing one for true.
    copied = (
        "draft_vocab_size", "target_hidden_size", "norm_before_residual", "norm_before_fc",
        "fc_norm", "norm_output", "eagle_aux_hidden_state_layer_ids",
    )  # fmt: skip
    return {key: config[key] for key in copied} | {"embed_requires_grad": False}


def peagle_keys(config: dict[str, Any]) -> dict[str, Any]:
    copied = {key: config[key] for key in ("mask_token_id", "parallel_drafting")}
    return eagle3_keys(config) | copied


def eagle1_keys(config: dict[str, Any]) -> dict[str, Any]:
    return {
        "transformer_layer_architecture": "LlamaDecoderLayer",
        "fusion_bias": config["bias"],
        "layernorms": config.get("layernorms", False),
    }


HEAD_KEYS = (  # of DSpark's heads
    "markov_rank", "markov_head_type", "enable_confidence_head", "confidence_head_with_markov"
)  # fmt: skip


def block_keys(config: dict[str, Any]) -> dict[str, Any]:
    block = config["dflash_config"]
    return {
        "draft_vocab_size": config["vocab_size"],
        "block_size": config["block_size"],
        "mask_token_id": block["mask_token_id"],
        # Layers are counted by their inputs.
        "aux_hidden_state_layer_ids": [layer + 1 for layer in block["target_layer_ids"]],
        "sample_from_anchor": block["sample_from_anchor"],
        "sliding_window_non_causal": True,
        **{key: config[key] for key in HEAD_KEYS if key in config},
    }


def check_block(source: ExportSource) -> None:
    portable.check_block(source)
    shape = source.drafter.shape
    if shape.causal or any(shape.windows):
        raise UserError(
            "the speculators layout has blocks whose slots all see each other, and this draft's "
            "do not; train it with draft.causal=false, or export it --to vllm"
        )


def check_eagle1(source: ExportSource) -> None:
    """The library's model takes the target's embeddings, and turns the heads as the target does."""
    check_sees_all(source, "the speculators library")
    portable.check_layer(source)
    config, target = source.drafter.portable_config(), text_config(source.target_config)
    width = target.get("head_dim") or target["hidden_size"] // target["num_attention_heads"]
    for key, theirs in {**rope_of(target), "head_dim": width}.items():
        if config[key] != theirs:
            raise UserError(
                f"the draft has {key}={config[key]!r} and {source.target_name!r} {theirs!r}, with "
                "which the speculators library would run the draft; export it --to vllm"
            )
    rope = target.get("rope_parameters") or target
    kinds = [key for key, value in rope.items() if key.endswith("_attention") and value]
    if kinds or rope.get("partial_rotary_factor", 1.0) != 1.0:
        raise UserError(
            f"{source.target_name!r} has a partial rotary embedding or one for each kind of layer, "
            "with which the speculators library would run the draft; export it --to vllm"
        )
    if (own := source.drafter.embed_tokens) is not None:
        theirs = target_tensor(source, EMBEDDINGS)
        if not torch.equal(own.weight, theirs.to(own.weight.dtype)):
            raise UserError(
                "the draft has embeddings of its own and the speculators library takes those of "
                f"{source.target_name!r} for them; export it --to vllm"
            )


EAGLE3 = Kind(
    "eagle3", ("Eagle3Speculator",), portable.check_eagle3, eagle3_keys,
    names={"midlayer.": "layers.0."}, left_out=("eagle_config",),
)  # fmt: skip
BLOCK = Kind(
    "dflash", ("DFlashSpeculator",), check_block, block_keys,
    left_out=("dflash_config", "target_layer_ids", *HEAD_KEYS),
)  # fmt: skip
KINDS = {
    "eagle3": EAGLE3,
    "p-eagle": EAGLE3._replace(
        type="peagle", architectures=("PEagleSpeculator",), keys=peagle_keys
    ),
    "eagle1": Kind(
        "eagle", ("EagleSpeculator", "LlamaDecoderLayer"), check_eagle1, eagle1_keys,
        names={"fc.": "fusion_fc.", "layers.0.": "transformer."}, left_out=("bias", "layernorms"),
        shared=(EMBEDDINGS,),
    ),
    "dflash": BLOCK,
    "dspark": BLOCK._replace(type="dspark", architectures=("DSparkSpeculator",)),
}  # fmt: skip
