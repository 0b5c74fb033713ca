"""The `speculators` library's own reading of the types that vLLM does not read: `eagle`, in its
releases from 0.1 to 0.6, and `mtp`, in those from 0.6 on. It loads by transformers'
`from_pretrained`, which passes over names that it does not know."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from draftsmith.drafters.draft_shape import rope_of
from draftsmith.drafters.weights import read_config, read_weights
from draftsmith.errors import UserError
from draftsmith.train.export.source import text_config
from tests.engine_readers.understood import (
    BLOCK_NORMS,
    LAYER_NORMS,
    Shapes,
    Understood,
    decoder_layer,
    filled,
    gated,
    renamed,
)

NAME = "speculators"
LAYER = "transformer_layer_config"
HEAD_NORMS = ("embedding_layernorm.weight", "pre_lm_head_layernorm.weight")


def layer_of(outer: dict[str, Any], kind: str) -> dict[str, Any]:
    if outer.get("speculators_model_type") != kind:
        raise UserError(
            f"{NAME} reads speculators_model_type {outer.get('speculators_model_type')!r} as "
            "another family"
        )
    plan = outer["speculators_config"]
    named = [method["proposal_type"] for method in plan["proposal_methods"]]
    if plan["default_proposal_method"] not in named or "model_type" not in outer[LAYER]:
        raise UserError(
            f"{NAME} finds no proposal method or no kind of layer in config.json; the layout is "
            "wrong"
        )
    return dict(outer[LAYER])


def read_eagle1(folder: Path, target_config: dict[str, Any]) -> Understood:
    """Embeddings, rotary embedding and head are the target's."""
    outer, target = read_config(folder), text_config(target_config)
    config = layer_of(outer, "eagle")
    hidden, has_norms = config["hidden_size"], bool(outer.get("layernorms"))
    norms = LAYER_NORMS if has_norms else LAYER_NORMS[1:]
    shapes = decoder_layer("transformer.", config, norms=norms)
    shapes["fusion_fc.weight"] = (hidden, 2 * hidden)
    if outer.get("fusion_bias"):
        shapes["fusion_fc.bias"] = (hidden,)
    if has_norms:
        shapes |= dict.fromkeys(HEAD_NORMS, (hidden,))
    loaded = filled(NAME, read_weights(folder), shapes, strict=False)
    layer, fusion = renamed(loaded, "transformer.", "layers.0."), renamed(loaded, "fusion_", "")
    ends = {name: loaded[name] for name in HEAD_NORMS if has_norms}
    width = target.get("head_dim") or target["hidden_size"] // target["num_attention_heads"]
    turned = {**config, **rope_of(target), "head_dim": width}
    own = {"architectures": ["EagleLlamaForCausalLM"], "layernorms": has_norms}
    return Understood(turned | own, layer | fusion | ends)


def read_mtp(folder: Path, target_config: dict[str, Any]) -> Understood:
    """Embeddings and head are the target's; the layer is one of the target's class."""
    outer = read_config(folder)
    values = layer_of(outer, "mtp")
    if outer.get("num_nextn_predict_layers", 1) != 1:
        raise UserError(f"{NAME} runs one MTP module; the layout is wrong")
    shapes = {f"mtp_layers.0.{name}": shape for name, shape in module(values).items()}
    tensors = filled(NAME, read_weights(folder), shapes, strict=False)
    return Understood({**values, "speculators_model_type": "mtp"}, tensors)


def module(values: dict[str, Any]) -> Shapes:
    """Parameters behind `mtp_layers.0.`; experts are stacked."""
    hidden = values["hidden_size"]
    shapes = decoder_layer("", {"intermediate_size": 0, **values}, norms=BLOCK_NORMS)
    if values["model_type"] != "qwen3":  # whose queries bring no gates
        rows, columns = shapes["self_attn.q_proj.weight"]
        shapes["self_attn.q_proj.weight"] = (2 * rows, columns)
    if has_experts(values):
        shapes = {name: one for name, one in shapes.items() if not name.startswith("mlp.")}
        shapes |= experts(values)
    shapes["input_proj.weight"] = (hidden, 2 * hidden)
    for name in ("token_layernorm", "hidden_layernorm", "final_layernorm"):
        shapes[f"{name}.weight"] = (hidden,)
    return shapes


def has_experts(values: dict[str, Any]) -> bool:
    """Experts in the last layer with attention over the whole text, whose like the module's is."""
    kinds = values.get("layer_types") or ["full_attention"] * values["num_hidden_layers"]
    index = max(at for at, kind in enumerate(kinds) if kind == "full_attention")
    step = values.get("decoder_sparse_step") or 1
    sparse = index not in (values.get("mlp_only_layers") or ()) and (index + 1) % step == 0
    return values.get("num_experts", 0) > 0 and (values["model_type"] != "qwen3_next" or sparse)


def experts(values: dict[str, Any]) -> Shapes:
    hidden, count = values["hidden_size"], values["num_experts"]
    inner, shared = values["moe_intermediate_size"], values["shared_expert_intermediate_size"]
    return {
        "mlp.gate.weight": (count, hidden),
        "mlp.experts.gate_up_proj": (count, 2 * inner, hidden),
        "mlp.experts.down_proj": (count, hidden, inner),
        "mlp.shared_expert_gate.weight": (1, hidden),
        **gated("mlp.shared_expert", shared, hidden),
    }
