"""An MTP module as part of its target's folder, which engines serve with `method: mtp`: in the
layout it came in, or MiMo's; or in MiMo's layout in a folder of its own."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file

from draftsmith.drafters.draft_shape import rope_of
from draftsmith.drafters.heads.mtp import READS_FINAL, STITCHED, uses_window
from draftsmith.drafters.heads.mtp_layouts import MIMO, QWEN, layout_of, swapped, text_values
from draftsmith.drafters.init_from_target import shares_embeddings
from draftsmith.drafters.weights import read_weights, safe_files, stored_tensors, write_weights
from draftsmith.errors import UserError
from draftsmith.files import write_json
from draftsmith.train.export.portable import target_table
from draftsmith.train.export.source import (
    ExportSource,
    check_sees_all,
    copy_tokenizer,
    target_tensor,
    tensor_shapes,
    text_config,
    write_config,
)

PROJECTIONS = ("q", "k", "v")
PAIRS = "model.mtp_block."  # Ernie's
ROUTING = {"topk_method": "noaux_tc", "scoring_func": "sigmoid"}


MODULE_FILE = "model-mtp.safetensors"


def write_mtp(source: ExportSource, out: Path) -> None:
    if layout_of(source.config) is not None:
        check_routing(source.target_config)
        write_back(source, out, for_vllm(source, read_weights(source.draft)))
        return
    check_sees_all(source, "vLLM's MTP module")
    write = write_alone if source.config.get(READS_FINAL) else write_stitched
    write(source, out)


def write_sglang(source: ExportSource, out: Path) -> None:
    """Qwen's modules alone: for the others SGLang reads the token at position 0, which vLLM and
    training here leave out, or hands on another state."""
    if (layout := layout_of(source.config)) is None or layout.needed != QWEN.needed:
        raise UserError(
            f"SGLang runs the MTP module of a {text_config(source.target_config)['model_type']!r} "
            "target otherwise than it is trained (the first position, or the state that is handed "
            "on); for SGLang train an eagle3 draft, for vLLM export --to vllm"
        )
    write_back(source, out, read_weights(source.draft))


def write_alone(source: ExportSource, out: Path) -> None:
    """MiMo's layout without the target's layers: the module and copies of the target's tables,
    which the engine loads and then takes the target's own for."""
    if not shares_embeddings(source.outline):
        raise UserError(
            f"{source.target_name!r} scales its token embeddings, which engines do not do for a "
            "draft that shares them; train an eagle3 draft, which has its own"
        )
    config = source.config
    check_block(config, text_config(source.target_config), source.target_name)
    module = mimo_tensors(source.drafter.state_dict())
    dtype = next(iter(module.values())).dtype
    tables = {
        "model.embed_tokens.weight": target_tensor(source, "embed_tokens.weight"),
        "lm_head.weight": target_table(source),
    }
    tensors = module | zero_biases(module, {})
    tensors |= {name: table.to(dtype) for name, table in tables.items()}
    write_weights(out, alone_config(config, source.target_config), tensors)


def check_block(config: dict[str, Any], target: dict[str, Any], name: str) -> None:
    """The engine builds the module's block from the target's config, as a Qwen2 block."""
    shared = ("hidden_size", "vocab_size", "num_attention_heads", "intermediate_size")
    wanted = {key: target.get(key) for key in shared} | {
        "num_key_value_heads": target.get("num_key_value_heads") or target["num_attention_heads"],
        "head_dim": target["hidden_size"] // target["num_attention_heads"],
        "hidden_act": target.get("hidden_act"),
        "rms_norm_eps": target.get("rms_norm_eps"),
        **rope_of(target),
    }
    for key, own in wanted.items():
        if config.get(key) != own:
            raise UserError(
                f"the MTP draft has {key}={config.get(key)!r} where vLLM builds its block with "
                f"{own!r}, from {name!r}; train an eagle3 draft"
            )
    rope = target.get("rope_parameters") or target
    if uses_window(target) or rope.get("partial_rotary_factor", 1.0) != 1.0:
        raise UserError(
            f"{name!r} has a sliding window or a partial rotary embedding, which vLLM would give "
            "to the module's block too; train an eagle3 draft"
        )


def alone_config(config: dict[str, Any], target_config: dict[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in config.items() if key != "attention_bias"} | {
        "architectures": ["MiMoForCausalLM"],
        "model_type": "qwen2",
        "num_hidden_layers": text_config(target_config)["num_hidden_layers"],
        "num_nextn_predict_layers": 1,
        "use_sliding_window": False,
        "tie_word_embeddings": False,
    }


def check_routing(config: dict[str, Any]) -> None:
    """vLLM goes by two keys that transformers' DeepSeek does not read."""
    found = {key: config.get(key) for key in ROUTING}
    if config["model_type"] == "deepseek_v3" and found != ROUTING:
        raise UserError(
            f"the target has {found}, and vLLM routes as transformers does by {ROUTING} alone; put "
            "these into its config.json"
        )


def write_back(source: ExportSource, out: Path, module: dict[str, torch.Tensor]) -> None:
    """A module of a layer of the target's own class in the place of the one that the target brought
    along, or beside the target's layers where it lacks one. What is shared with the target stays.
    """
    shapes = tensor_shapes(source.target)
    config = source.target_config
    if module.keys().isdisjoint(shapes):
        config = counted_config(source)
        shapes = shapes | {name: tuple(tensor.shape) for name, tensor in module.items()}
    for name, tensor in module.items():
        if shapes.get(name) != tuple(tensor.shape):
            raise UserError(
                f"weight {name!r} of the MTP draft has shape {list(tensor.shape)} and "
                f"{source.target_name!r} "
                f"{'none such' if name not in shapes else list(shapes[name])}; give --target the "
                "folder that it was trained from"
            )
    stitch(source.target, out, module, replaces=module.__contains__)
    write_config(out, config)
    copy_tokenizer(source.target, out)


def for_vllm(source: ExportSource, module: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """It rotates halves of the heads of Ernie's module, whose target rotates pairs: with the first
    and the second of all pairs in the two halves, that is the same."""
    if not any(name.startswith(PAIRS) for name in module):
        return module
    config = source.config
    width = config.get("head_dim") or config["hidden_size"] // config["num_attention_heads"]
    changed = dict(module)
    for name, tensor in module.items():
        if name.endswith(("q_proj.weight", "k_proj.weight")):
            pairs = tensor.unflatten(0, (-1, width // 2, 2))
            changed[name] = pairs.transpose(1, 2).flatten(0, 2).contiguous()
    return changed


def check_kind(source: ExportSource) -> None:
    """Refuses a target of another kind than the module's."""
    own, target = text_values(source.config), text_config(source.target_config)
    for key in ("model_type", "num_hidden_layers", "hidden_size", "vocab_size"):
        if own.get(key) != target.get(key):
            raise UserError(
                f"the MTP draft is for a target with {key}={own.get(key)!r} and "
                f"{source.target_name!r} has {target.get(key)!r}; give --target the folder that it "
                "was trained for"
            )


def counted_config(source: ExportSource) -> dict[str, Any]:
    """The target's config, which counts a module now, where engines look for it."""
    check_kind(source)
    layout, config = layout_of(source.config), source.target_config
    values = text_config(config)
    assert layout is not None
    counted = {layout.counted_by: source.config.get(layout.counted_by, 1)}
    if values is config:
        return config | counted
    return config | {"text_config": config["text_config"] | counted}


def write_stitched(source: ExportSource, out: Path) -> None:
    check_target(source)
    module = mimo_tensors(source.drafter.state_dict())
    target_shapes = {
        name: shape
        for name, shape in tensor_shapes(source.target).items()
        if not name.startswith(MIMO.prefix)
    }
    check_layer(module, target_shapes)
    stitched = module | zero_biases(module, target_shapes)
    stitch(source.target, out, stitched, replaces=lambda name: name.startswith(MIMO.prefix))
    write_config(out, stitched_config(source.target_config))
    copy_tokenizer(source.target, out)


def check_target(source: ExportSource) -> None:
    config = source.target_config
    kind = config["model_type"]
    if kind not in STITCHED:
        raise UserError(
            f"no engine layout holds an MTP module for a {kind!r} target; MTP is exported for "
            f"{', '.join(STITCHED)}, "
            "train an eagle3 draft for this one"
        )
    heads = config["num_attention_heads"]
    refused = {
        "mlp_bias": config.get("mlp_bias", False),
        "hidden_act": config["hidden_act"] != "silu",
        "sliding_window": uses_window(config),
        "head_dim": (config.get("head_dim") or config["hidden_size"] // heads)
        != config["hidden_size"] // heads,
    }
    for key, wrong in refused.items():
        if wrong:
            raise UserError(
                f"{source.target_name!r} has {key}={config.get(key)!r}, which MiMo's layout "
                "cannot express; train an eagle3 draft"
            )
    odd = [
        name
        for name in tensor_shapes(source.target)
        if name.endswith("o_proj.bias") or "_norm.weight" in name
    ]
    if odd:
        raise UserError(
            f"{source.target_name!r} has weights like {odd[0]!r}, which MiMo's layout lacks; "
            "train an eagle3 draft"
        )


def mimo_tensors(draft: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Our module under MiMo's names."""
    draft = {**draft, "eh_proj.weight": swapped(draft["eh_proj.weight"])}
    return {MIMO.prefix + MIMO.published_name(name): tensor for name, tensor in draft.items()}


def check_layer(module: dict[str, torch.Tensor], target_shapes: dict[str, tuple[int, ...]]) -> None:
    """The engine builds the module's decoder layer with the target's dimensions."""
    for name, shape in target_shapes.items():
        own = name.replace("model.layers.0.", MIMO.prefix)
        if name.startswith("model.layers.0.") and not name.endswith(".bias"):
            if own not in module:
                raise UserError(
                    f"weight {own!r} is missing from the MTP draft; train or save the draft again"
                )
            if tuple(module[own].shape) != shape:
                raise UserError(
                    f"weight {own!r} has shape {list(module[own].shape)} where the target's "
                    f"layers have {list(shape)}; "
                    "MiMo's layout needs an MTP layer of the target's shape"
                )


def zero_biases(
    module: dict[str, torch.Tensor], target_shapes: dict[str, tuple[int, ...]]
) -> dict[str, torch.Tensor]:
    """The q, k and v biases that a Qwen2 block has and this target or module lacks."""
    weights = {name: shape for name, shape in target_shapes.items() if ".self_attn." in name}
    weights |= {key: tuple(tensor.shape) for key, tensor in module.items() if ".self_attn." in key}
    dtype = next(iter(module.values())).dtype
    biases = {}
    for name, shape in weights.items():
        bias = name.replace(".weight", ".bias")
        if (
            any(name.endswith(f"{kind}_proj.weight") for kind in PROJECTIONS)
            and bias not in weights
        ):
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


def stitch(
    target: Path, out: Path, module: Mapping[str, torch.Tensor], *, replaces: Callable[[str], bool]
) -> None:
    """The target's files but for the tensors that the module `replaces`, the module's, and an index
    of all."""
    weight_map = copy_target_weights(target, out, replaces)
    own = {name: tensor.contiguous() for name, tensor in module.items()}
    save_file(own, out / MODULE_FILE, metadata={"format": "pt"})
    weight_map |= dict.fromkeys(own, MODULE_FILE)
    num_bytes = sum((out / file).stat().st_size for file in set(weight_map.values()))
    write_json(
        out / "model.safetensors.index.json",
        {"metadata": {"total_size": num_bytes}, "weight_map": weight_map},
    )


def copy_target_weights(target: Path, out: Path, replaces: Callable[[str], bool]) -> dict[str, str]:
    """Returns tensor name -> file name in `out`."""
    weight_map: dict[str, str] = {}
    for file in safe_files(target):
        # Loaders take a `model.safetensors` for the whole model and never look at the index.
        name = (
            file.name
            if file.name not in ("model.safetensors", MODULE_FILE)
            else f"{file.stem}-target.safetensors"
        )
        names = list(stored_tensors(file))
        kept = [tensor for tensor in names if not replaces(tensor)]
        if len(kept) == len(names):
            shutil.copyfile(file, out / name)
        elif kept:
            tensors = load_file(file)
            save_file(
                {tensor: tensors[tensor] for tensor in kept}, out / name, metadata={"format": "pt"}
            )
        weight_map |= dict.fromkeys(kept, name)
    return weight_map
