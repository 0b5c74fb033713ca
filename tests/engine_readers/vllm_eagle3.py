"""vLLM's reading of EAGLE-3 and P-EAGLE heads: one model class for both, and for the `speculators`
layout."""

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
    decoder_layer,
    filled,
    renamed,
)
from tests.engine_readers.vllm_speculators import layer_of
from tests.engine_readers.vllm_taps import NAME, tapped_layers

ARCHITECTURES = (
    "Eagle3LlamaForCausalLM",
    "LlamaForCausalLMEagle3",
    "PEagleDraftModel",
    "PeagleLlamaForCausalLM",
)


def read_eagle3(folder: Path, target_config: dict[str, Any]) -> Understood:
    return eagle3_from(read_config(folder), read_weights(folder), target_config)


def read_peagle(folder: Path, target_config: dict[str, Any]) -> Understood:
    """A head read with `parallel_drafting` among the engine's own options; the token of the slots
    is one of three keys of the draft."""
    config = read_config(folder)
    assert any(
        config.get(key) is not None for key in ("pard_token", "ptd_token_id", "mask_token_id")
    )
    return eagle3_from(config, read_weights(folder), target_config, parallel=True)


def read_speculators_eagle3(folder: Path, target_config: dict[str, Any]) -> Understood:
    config = flattened(folder, "eagle3", norm_before_residual=True)
    config |= {"norm_output": read_config(folder).get("norm_output", False)}
    return eagle3_from(config, read_weights(folder), target_config)


def read_speculators_peagle(folder: Path, target_config: dict[str, Any]) -> Understood:
    config = flattened(folder, "peagle", norm_before_residual=False)
    token = read_config(folder)["mask_token_id"]
    config |= {
        "pard_token": token,
        "mask_token_id": token,
        "architectures": ["PeagleLlamaForCausalLM"],
    }
    return eagle3_from(config, read_weights(folder), target_config, parallel=True)


def flattened(folder: Path, kind: str, *, norm_before_residual: bool) -> dict[str, Any]:
    outer = read_config(folder)
    config = {
        **layer_of(outer, kind),
        "draft_vocab_size": outer.get("draft_vocab_size"),
        "norm_before_residual": outer.get("norm_before_residual", norm_before_residual),
        "norm_before_fc": outer.get("norm_before_fc", False),
        "fc_norm": outer.get("fc_norm", False),
        "architectures": ["Eagle3LlamaForCausalLM"],
    }
    for key in ("target_hidden_size", "eagle_aux_hidden_state_layer_ids"):
        if outer.get(key) is not None:
            config[key] = outer[key]
    return config


def eagle3_from(
    config: dict[str, Any],
    tensors: dict[str, torch.Tensor],
    target_config: dict[str, Any],
    *,
    parallel: bool = False,
) -> Understood:
    assert config["architectures"][0] in ARCHITECTURES
    nested = config.get("eagle_config") or {}
    raw = tapped_layers(config, text_config(target_config)["num_hidden_layers"])
    num_taps = config.get("num_aux_hidden_states") or len(
        nested.get("eagle_aux_hidden_state_layer_ids") or (0, 0, 0)
    )
    assert num_taps == len(raw) and nested.get("use_aux_hidden_state", True)
    shapes, optional = _shapes(config, num_taps, parallel=parallel)
    loaded = filled(NAME, tensors, shapes, optional=optional, named=engine_name)
    draft_vocab = config.get("draft_vocab_size") or config["vocab_size"]
    return own_eagle3(config | {"draft_vocab_size": draft_vocab}, raw, loaded)


def engine_name(name: str) -> str | None:
    if "t2d" in name:
        return None
    if "d2t" in name:
        return name.replace("d2t", "draft_id_to_target_id")
    if "lm_head" in name or "mask_hidden" in name:
        return name
    return "model." + name.replace("midlayer.", "layers.0.")


def _shapes(config: dict[str, Any], num_taps: int, *, parallel: bool) -> tuple[Shapes, Shapes]:
    """Shapes of the tensors that must be there, and of those that may be."""
    hidden, vocab = config["hidden_size"], config["vocab_size"]
    draft_vocab = config.get("draft_vocab_size") or vocab
    width = config.get("target_hidden_size") or hidden
    shapes = decoder_layer(
        "model.layers.0.", config, norms=(*LAYER_NORMS, "hidden_norm"), wide=True
    )
    shapes |= {
        "model.fc.weight": (hidden, num_taps * width),
        "model.norm.weight": (hidden,),
        "lm_head.weight": (draft_vocab, hidden),
    }
    for layer in range(1, config["num_hidden_layers"]):
        shapes |= decoder_layer(f"model.layers.{layer}.", config, norms=LAYER_NORMS)
    if config.get("norm_before_fc"):
        shapes["model.input_norm.weight"] = (num_taps * width,)
    if config.get("fc_norm"):
        shapes |= {f"model.fc_norm.{index}.weight": (width,) for index in range(num_taps)}
    if draft_vocab != vocab:
        # Without it draft token i would be taken for target token i.
        shapes["draft_id_to_target_id"] = (draft_vocab,)
    if parallel:
        shapes["mask_hidden"] = (1, num_taps * width)
    optional: Shapes = {"model.embed_tokens.weight": (vocab, hidden)}
    # Every layer has this norm and only the first one uses it.
    optional |= {
        f"model.layers.{layer}.hidden_norm.weight": (hidden,)
        for layer in range(1, config["num_hidden_layers"])
    }
    return shapes, optional


def own_eagle3(
    config: dict[str, Any], raw: list[int], loaded: dict[str, torch.Tensor]
) -> Understood:
    tensors = renamed(loaded, "model.", "")
    tensors = {
        name.replace("layers.0.", "midlayer.", 1): tensor for name, tensor in tensors.items()
    }
    tensors |= {name: loaded[name] for name in ("lm_head.weight", "mask_hidden") if name in loaded}
    if "draft_id_to_target_id" in loaded:
        tensors["d2t"] = loaded["draft_id_to_target_id"]
    return Understood({**config, "eagle_aux_hidden_state_layer_ids": raw}, tensors)
