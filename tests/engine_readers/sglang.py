"""SGLang's reading of draft folders. It skips unknown tensors, so a wrong name is
served as random numbers."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

from draftsmith.drafters.weights import read_config, read_weights
from draftsmith.train.export.source import text_config
from tests.engine_readers.understood import (
    LAYER_NORMS,
    Shapes,
    Understood,
    block_shapes,
    decoder_layer,
    filled,
    in_layer_order,
    renamed,
)
from tests.engine_readers.vllm import own_block

NAME = "SGLang"
# Names of older drafts.
LEGACY = {
    "midlayer": "layers.0",
    "aux_norm_low": "fc_norm.0",
    "aux_norm_mid": "fc_norm.1",
    "aux_norm_high": "fc_norm.2",
}


def read_eagle3(folder: Path, target_config: dict[str, Any]) -> Understood:
    config = read_config(folder)
    assert config["architectures"] == ["LlamaForCausalLMEagle3"] and (
        not config.get("tie_word_embeddings")
    )
    nested = config.get("eagle_config") or {}
    outputs = nested.get("eagle_aux_hidden_state_layer_ids")
    num_layers = text_config(target_config)["num_hidden_layers"]
    chosen = [layer + 1 for layer in outputs] if outputs else [2, num_layers // 2, num_layers - 3]
    raw = in_layer_order(chosen, num_layers)
    num_taps, hidden = (
        config.get("num_aux_hidden_states") or len(outputs or (0, 0, 0)),
        config["hidden_size"],
    )
    assert num_taps == len(raw) and "draft_vocab_size" in config
    width, draft_vocab = config.get("target_hidden_size", hidden), config["draft_vocab_size"]
    shapes = {"model.fc.weight": (hidden, num_taps * width), "model.norm.weight": (hidden,)}
    for layer in range(config["num_hidden_layers"]):
        # Unlike vLLM's, a later layer has both norms and uses `hidden_norm`.
        shapes |= decoder_layer(
            f"model.layers.{layer}.", config, norms=(*LAYER_NORMS, "hidden_norm"), wide=layer == 0
        )
    optional: Shapes = {"model.embed_tokens.weight": (config["vocab_size"], hidden)}
    if draft_vocab is not None:
        shapes["lm_head.weight"] = (draft_vocab, hidden)
    if nested.get("norm_before_fc", config.get("norm_before_fc")):
        shapes["model.input_norm.weight"] = (num_taps * width,)
    if config.get("fc_norm"):
        shapes |= {f"model.fc_norm.{index}.weight": (width,) for index in range(num_taps)}
    tensors, known = read_weights(folder), shapes | optional
    hot = tensors.get("d2t")
    loaded = filled(
        NAME, tensors, shapes, optional=optional, strict=False,
        named=lambda name: engine_name(name, known),
    )  # fmt: skip
    # No such path, and no window, there, whatever the config says.
    config = {**config, "norm_before_residual": False, "eagle_aux_hidden_state_layer_ids": raw}
    config.pop("layer_types", None)
    return Understood(config, own_eagle3(loaded, hot, draft_vocab, config["vocab_size"]))


def engine_name(name: str, known: Shapes) -> str:
    for old, new in LEGACY.items():
        name = name.replace(old, new)
    return name if name in known else f"model.{name}"


def own_eagle3(
    loaded: dict[str, torch.Tensor], hot: torch.Tensor | None, draft_vocab: int | None, vocab: int
) -> dict[str, torch.Tensor]:
    tensors = {
        name.replace("layers.0.", "midlayer.", 1): tensor
        for name, tensor in renamed(loaded, "model.", "").items()
    }
    if "lm_head.weight" in loaded:
        tensors["lm_head.weight"] = loaded["lm_head.weight"]
    if hot is not None:
        tensors["d2t"] = hot
    else:
        assert draft_vocab in (None, vocab), "draft token i would be taken for target token i"
    return tensors


def read_eagle1(folder: Path, target_config: dict[str, Any]) -> Understood:
    """The first layer has no norm before its attention, and the end none; the projection has a
    bias."""
    config = read_config(folder)
    assert config["architectures"] == ["LlamaForCausalLMEagle"]
    hidden, vocab = config["hidden_size"], config["vocab_size"]
    shapes = decoder_layer("layers.0.", config, norms=("post_attention_layernorm",))
    shapes |= {"fc.weight": (hidden, 2 * hidden), "fc.bias": (hidden,)}
    shared = dict.fromkeys(("embed_tokens.weight", "lm_head.weight"), (vocab, hidden))
    loaded = filled(NAME, read_weights(folder), shapes, optional=shared, strict=False)
    loaded.pop("lm_head.weight", None)
    return Understood(config, loaded)


def read_dflash(folder: Path, target_config: dict[str, Any]) -> Understood:
    return block_from(folder, target_config, architecture="DFlashDraftModel")


def read_dspark(folder: Path, target_config: dict[str, Any]) -> Understood:
    return block_from(folder, target_config, architecture="Qwen3DSparkModel")


def block_from(folder: Path, target_config: dict[str, Any], *, architecture: str) -> Understood:
    config = read_config(folder)
    block = config.get("dflash_config") or {}
    assert config["architectures"] == [architecture]
    # A missing id makes it add a token to the vocabulary.
    mask = block.get("mask_token_id", config.get("mask_token_id"))
    assert mask is not None and mask < config["vocab_size"]
    target_layers = text_config(target_config)["num_hidden_layers"]
    assert block.get("num_target_layers", config.get("num_target_layers")) == target_layers
    outputs = block.get("target_layer_ids", config.get("target_layer_ids")) or []
    raw = in_layer_order([layer + 1 for layer in outputs], target_layers)
    needed, guess = block_shapes(config, len(raw), text_config(target_config)["hidden_size"])
    loaded = filled(
        NAME, read_weights(folder), needed | guess, strict=False,
        named=lambda name: name.removeprefix("model."),
    )  # fmt: skip
    return own_block(config, raw, loaded)
