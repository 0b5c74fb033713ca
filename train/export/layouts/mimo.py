"""An MTP module stitched into its target in MiMo's layout: the one that engines read for dense Llama- and Qwen2-like models.

The folder is a whole target: engines serve it with `method: mtp`, and transformers loads it as the plain target (Qwen2 with
zero biases), ignoring the module. Its files are the target's own plus one.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

from draftsmith.drafters.weights import read_weights
from draftsmith.errors import UserError
from draftsmith.train.export.layouts.source import Source, tensor_shapes, write_config
from draftsmith.train.export.layouts.stitch import stitch
from draftsmith.train.export.layouts.tokenizer import copy_tokenizer

# Same block as Qwen2 up to the biases. Others differ in what the tensors mean (Gemma's norms), not only in which there are.
TARGETS = ("llama", "mistral", "qwen2")
MODULE = "model.mtp_layers.0."
PROJECTIONS = ("q", "k", "v")


def write_stitched(source: Source, out: Path) -> None:
    check_target(source)
    draft = read_weights(source.draft)
    module = mimo_tensors(draft)
    target_shapes = {name: shape for name, shape in tensor_shapes(source.target).items() if not name.startswith(MODULE)}
    check_layer(module, target_shapes)
    stitched = module | zero_biases(module, target_shapes)
    stitch(source.target, out, stitched, replaces=lambda name: name.startswith(MODULE))
    write_config(out, stitched_config(source.target_config))
    copy_tokenizer(source.target, out)


def check_target(source: Source) -> None:
    config = source.target_config
    kind = config["model_type"]
    if kind not in TARGETS:
        raise UserError(
            f"no engine layout holds an MTP module for a {kind!r} target; MTP is exported for {', '.join(TARGETS)}, "
            "train an eagle3 draft for this one"
        )
    heads = config["num_attention_heads"]
    refused = {
        "mlp_bias": config.get("mlp_bias", False),
        "hidden_act": config["hidden_act"] != "silu",
        "sliding_window": uses_window(config),
        "head_dim": (config.get("head_dim") or config["hidden_size"] // heads) != config["hidden_size"] // heads,
    }
    for key, wrong in refused.items():
        if wrong:
            raise UserError(
                f"{source.target_name!r} has {key}={config.get(key)!r}, which MiMo's layout cannot express; train an eagle3 draft"
            )
    odd = [name for name in tensor_shapes(source.target) if name.endswith("o_proj.bias") or "_norm.weight" in name]
    if odd:
        raise UserError(f"{source.target_name!r} has weights like {odd[0]!r}, which MiMo's layout lacks; train an eagle3 draft")


def uses_window(config: dict[str, Any]) -> bool:
    windowed = config.get("sliding_window") is not None and config.get("use_sliding_window", True)
    return windowed or "sliding_attention" in (config.get("layer_types") or ())


def mimo_tensors(draft: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Our module under MiMo's names. Its projection reads [hidden, embedding], ours [embedding, hidden]."""
    renamed = {}
    for name, tensor in draft.items():
        if name == "eh_proj.weight":
            embedding, hidden = tensor.chunk(2, dim=1)
            tensor = torch.cat([hidden, embedding], dim=1)
        renamed[MODULE + mimo_name(name)] = tensor
    return renamed


def mimo_name(name: str) -> str:
    own_names = {
        "enorm.weight": "token_layernorm.weight",
        "hnorm.weight": "hidden_layernorm.weight",
        "eh_proj.weight": "input_proj.weight",
        "norm.weight": "final_layernorm.weight",
    }
    return own_names.get(name, name.removeprefix("layer."))


def check_layer(module: dict[str, torch.Tensor], target_shapes: dict[str, tuple[int, ...]]) -> None:
    """The engine builds the module's decoder layer with the target's dimensions."""
    for name, shape in target_shapes.items():
        own = name.replace("model.layers.0.", MODULE)
        if name.startswith("model.layers.0.") and not name.endswith(".bias"):
            if own not in module:
                raise UserError(f"weight {own!r} is missing from the MTP draft; train or save the draft again")
            if tuple(module[own].shape) != shape:
                raise UserError(
                    f"weight {own!r} has shape {list(module[own].shape)} where the target's layers have {list(shape)}; "
                    "MiMo's layout wants an MTP layer of the target's shape"
                )


def zero_biases(module: dict[str, torch.Tensor], target_shapes: dict[str, tuple[int, ...]]) -> dict[str, torch.Tensor]:
    """The q, k and v biases that a Qwen2 block has and this target or module lacks."""
    weights = {name: shape for name, shape in target_shapes.items() if ".self_attn." in name}
    weights |= {name: tuple(tensor.shape) for name, tensor in module.items() if ".self_attn." in name}
    dtype = next(iter(module.values())).dtype
    biases = {}
    for name, shape in weights.items():
        bias = name.replace(".weight", ".bias")
        if any(name.endswith(f"{kind}_proj.weight") for kind in PROJECTIONS) and bias not in weights:
            biases[bias] = torch.zeros(shape[0], dtype=dtype)
    return biases


def stitched_config(target_config: dict[str, Any]) -> dict[str, Any]:
    dropped = ("attention_bias", "mlp_bias", "pretraining_tp", "sliding_window")
    config = {key: value for key, value in target_config.items() if key not in dropped}
    return config | {
        "architectures": ["MiMoForCausalLM"],
        "model_type": "qwen2",
        "num_nextn_predict_layers": 1,
        "use_sliding_window": False,
    }
