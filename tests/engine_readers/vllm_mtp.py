"""vLLM's reading of MTP modules: MiMo's, and those that stand after the target's layers as one more
(DeepSeek-V3, GLM-4.5) or beside them (`vllm_mtp_beside.py`)."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

from draftsmith.drafters.draft_shape import rope_of
from draftsmith.drafters.heads import mtp
from draftsmith.drafters.heads.mtp import READS_FINAL
from draftsmith.drafters.weights import read_config, read_weights, tensor_names
from draftsmith.errors import UserError
from draftsmith.train.export.source import text_config
from tests.engine_readers.understood import (
    LAYER_NORMS,
    Shapes,
    Understood,
    decoder_layer,
    filled,
    gated,
    renamed,
)
from tests.engine_readers.vllm_mtp_beside import BESIDE
from tests.engine_readers.vllm_taps import NAME

FROM_TARGET = (
    "hidden_size", "vocab_size", "num_attention_heads", "intermediate_size", "hidden_act",
    "rms_norm_eps", "max_position_embeddings",
)  # fmt: skip
DEEPSEEK = "DeepseekV3ForCausalLM"
LATENT = (DEEPSEEK, "Glm4MoeLiteForCausalLM")
GROUPED = ("Glm4MoeForCausalLM",)


def read_mtp(folder: Path, target_config: dict[str, Any]) -> Understood:
    config = read_config(folder)
    (architecture,) = config["architectures"]
    target = text_config(target_config)
    if (read_beside := BESIDE.get(config.get("model_type", ""))) is not None:
        return read_beside(folder, config)
    count = config.get("num_nextn_predict_layers") or 0
    # MiMo's class has one alone.
    if count < 1 or (architecture not in (*LATENT, *GROUPED) and count > 1):
        raise UserError(
            f"vLLM finds {count} MTP modules in {architecture!r}, which it cannot run; the layout "
            "is wrong"
        )
    if architecture in (*LATENT, *GROUPED):
        return read_appended(folder, config, architecture)
    if architecture != "MiMoForCausalLM":
        raise UserError(f"vLLM has no MTP module for {architecture!r}; the layout is wrong")
    if has_layers(folder):
        return read_mimo(folder, config)
    # A folder beside the target, of whose config the block is built, and whose final state it is
    # handed.
    heads = target["num_attention_heads"]
    built = {key: target[key] for key in FROM_TARGET} | {
        "num_key_value_heads": target.get("num_key_value_heads") or heads,
        "head_dim": target["hidden_size"] // heads,
        **rope_of(target),
    }
    read = read_mimo(folder, {**config, **built})
    return Understood({**read.config, READS_FINAL: True}, read.tensors)


def has_layers(folder: Path) -> bool:
    return any(name.startswith("model.layers.") for name in tensor_names(folder))


def read_appended(folder: Path, config: dict[str, Any], architecture: str) -> Understood:
    routing = (config.get("topk_method"), config.get("scoring_func"))
    if architecture == DEEPSEEK and routing != ("noaux_tc", "sigmoid"):
        raise UserError(
            f"vLLM routes by topk_method, scoring_func = {routing} what transformers routes by "
            "('noaux_tc', 'sigmoid'); "
            "put these into the target's config.json"
        )
    hidden = config["hidden_size"]
    shapes = latent_attention(config) if architecture in LATENT else grouped_attention(config)
    shapes |= experts(config) | {
        f"{norm}.weight": (hidden,) for norm in (*LAYER_NORMS, "enorm", "hnorm", "shared_head.norm")
    }
    shapes["eh_proj.weight"] = (hidden, 2 * hidden)
    # Whatever these hold, the target's take their place.
    shared = dict.fromkeys(
        ("embed_tokens.weight", "shared_head.head.weight"), (config["vocab_size"], hidden)
    )
    first = config["num_hidden_layers"]
    prefixes = tuple(
        f"model.layers.{first + index}." for index in range(config["num_nextn_predict_layers"])
    )
    needed, optional = (
        {prefix + name: shape for prefix in prefixes for name, shape in one.items()}
        for one in (shapes, shared)
    )
    tensors = filled(
        NAME, read_weights(folder), needed, optional=optional,
        named=lambda name: name if name.startswith(prefixes) else None,
    )  # fmt: skip
    return Understood(config, tensors, target=folder)


def latent_attention(config: dict[str, Any]) -> Shapes:
    heads, hidden, rank = (
        config["num_attention_heads"],
        config["hidden_size"],
        config["kv_lora_rank"],
    )
    nope, rope, value = config["qk_nope_head_dim"], config["qk_rope_head_dim"], config["v_head_dim"]
    shapes: Shapes = {
        "kv_a_proj_with_mqa": (rank + rope, hidden),
        "kv_a_layernorm": (rank,),
        "kv_b_proj": (heads * (nope + value), rank),
        "o_proj": (hidden, heads * value),
    }
    if (query_rank := config.get("q_lora_rank")) is None:
        shapes["q_proj"] = (heads * (nope + rope), hidden)
    else:
        shapes |= {"q_a_proj": (query_rank, hidden), "q_a_layernorm": (query_rank,)}
        shapes["q_b_proj"] = (heads * (nope + rope), query_rank)
    return {f"self_attn.{name}.weight": shape for name, shape in shapes.items()}


def grouped_attention(config: dict[str, Any]) -> Shapes:
    norms = ("self_attn.q_norm", "self_attn.k_norm") if config.get("use_qk_norm") else ()
    layer = decoder_layer("", config, norms=norms)
    shapes = {name: shape for name, shape in layer.items() if name.startswith("self_attn.")}
    return with_biases(shapes) if config.get("attention_bias") else shapes


def with_biases(layer: Shapes, prefix: str = "") -> Shapes:
    biased = (f"{prefix}self_attn.{kind}_proj" for kind in "qkv")
    return layer | {f"{name}.bias": layer[f"{name}.weight"][:1] for name in biased}


def experts(config: dict[str, Any]) -> Shapes:
    hidden, inner, count = (
        config["hidden_size"],
        config["moe_intermediate_size"],
        config["n_routed_experts"],
    )
    shapes: Shapes = {
        "mlp.gate.weight": (count, hidden),
        "mlp.gate.e_score_correction_bias": (count,),
    }
    widths = {f"experts.{number}": inner for number in range(count)}
    for name, width in {**widths, "shared_experts": inner * config["n_shared_experts"]}.items():
        shapes |= gated(f"mlp.{name}", width, hidden)
    return shapes


def read_mimo(folder: Path, config: dict[str, Any]) -> Understood:
    """The module's layer is a Qwen2 block; its projection reads the state first and the embedding
    second."""
    hidden, prefix = config["hidden_size"], "model.mtp_layers.0."
    norms = (*LAYER_NORMS, "token_layernorm", "hidden_layernorm", "final_layernorm")
    shapes = with_biases(decoder_layer(prefix, config, norms=norms), prefix)
    shapes[f"{prefix}input_proj.weight"] = (hidden, 2 * hidden)
    loaded = filled(
        NAME, read_weights(folder), shapes,
        named=lambda name: name if "mtp_layers" in name else None,
    )  # fmt: skip
    module = own_mtp(renamed(loaded, prefix, ""))
    own = {
        "architectures": [mtp.ARCHITECTURE],
        "attention_bias": "layer.self_attn.q_proj.bias" in module,
    }
    return Understood({**config, **own}, module, target=folder)


def own_mtp(module: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Biases that are all zero are those of drafts that have none."""
    biases = [name for name in module if name.endswith("_proj.bias")]
    if any(bool(module[name].any()) for name in biases):
        biases = []
    state, embedding = module["input_proj.weight"].chunk(2, dim=1)
    own = {"eh_proj.weight": torch.cat([embedding, state], dim=1)}
    names = {"token_layernorm": "enorm", "hidden_layernorm": "hnorm", "final_layernorm": "norm"}
    for name, tensor in module.items():
        part = name.removesuffix(".weight")
        if part in names:
            own[f"{names[part]}.weight"] = tensor
        elif part != "input_proj" and name not in biases:
            own[f"layer.{name}"] = tensor
    return own
