"""EAGLE-3 in the portable layout of vLLM and SGLang, and in vLLM's `speculators` layout.

The two engines read the tapped layers from different keys with different meanings, ignore unknown
names (SGLang) or refuse them (vLLM), and both take the taps in layer order whatever the config
says. All of that is checked here, because a draft that breaks one of these rules is served without
complaint and accepts nothing.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

from draftsmith.drafters.target.load import build_model, load_config
from draftsmith.drafters.weights import read_weights, write_weights
from draftsmith.errors import UserError
from draftsmith.train.export.layouts.source import (
    Source,
    check_fits,
    check_sees_all,
    check_shapes,
    tensor_shapes,
    text_config,
)

ARCHITECTURES = ("LlamaForCausalLMEagle3", "Eagle3LlamaForCausalLM")
SPECULATORS_VERSION = "0.5.0"


def expected_shapes(config: dict[str, Any]) -> dict[str, tuple[int, ...]]:
    """Every required tensor of the portable layout: name -> shape."""
    hidden, inner = config["hidden_size"], config["intermediate_size"]
    queries = config["num_attention_heads"] * config["head_dim"]
    keys = config["num_key_value_heads"] * config["head_dim"]
    shapes: dict[str, tuple[int, ...]] = {
        "fc.weight": (hidden, config["num_aux_hidden_states"] * config["target_hidden_size"]),
        "norm.weight": (hidden,),
        "lm_head.weight": (config["draft_vocab_size"], hidden),
        "midlayer.self_attn.q_proj.weight": (queries, 2 * hidden),
        "midlayer.self_attn.k_proj.weight": (keys, 2 * hidden),
        "midlayer.self_attn.v_proj.weight": (keys, 2 * hidden),
        "midlayer.self_attn.o_proj.weight": (hidden, queries),
        "midlayer.mlp.gate_proj.weight": (inner, hidden),
        "midlayer.mlp.up_proj.weight": (inner, hidden),
        "midlayer.mlp.down_proj.weight": (hidden, inner),
        "midlayer.input_layernorm.weight": (hidden,),
        "midlayer.hidden_norm.weight": (hidden,),
        "midlayer.post_attention_layernorm.weight": (hidden,),
    }
    for layer in range(1, config["num_hidden_layers"]):
        shapes |= plain_layer_shapes(f"layers.{layer}.", config)
    if config.get("norm_before_fc"):
        shapes["input_norm.weight"] = (
            config["num_aux_hidden_states"] * config["target_hidden_size"],
        )
    if config.get("fc_norm"):
        names = [f"fc_norm.{index}.weight" for index in range(config["num_aux_hidden_states"])]
        shapes |= dict.fromkeys(names, (config["target_hidden_size"],))
    if config["draft_vocab_size"] != config["vocab_size"]:
        shapes["d2t"] = (config["draft_vocab_size"],)
    if config["hidden_size"] != config["target_hidden_size"]:
        shapes["embed_tokens.weight"] = (config["vocab_size"], hidden)
    return shapes


def plain_layer_shapes(prefix: str, config: dict[str, Any]) -> dict[str, tuple[int, ...]]:
    hidden, inner = config["hidden_size"], config["intermediate_size"]
    queries = config["num_attention_heads"] * config["head_dim"]
    keys = config["num_key_value_heads"] * config["head_dim"]
    return {
        prefix + "self_attn.q_proj.weight": (queries, hidden),
        prefix + "self_attn.k_proj.weight": (keys, hidden),
        prefix + "self_attn.v_proj.weight": (keys, hidden),
        prefix + "self_attn.o_proj.weight": (hidden, queries),
        prefix + "mlp.gate_proj.weight": (inner, hidden),
        prefix + "mlp.up_proj.weight": (inner, hidden),
        prefix + "mlp.down_proj.weight": (hidden, inner),
        prefix + "input_layernorm.weight": (hidden,),
        prefix + "post_attention_layernorm.weight": (hidden,),
    }


def optional_shapes(config: dict[str, Any]) -> dict[str, tuple[int, ...]]:
    vocab = config["vocab_size"]
    return {"t2d": (vocab,), "embed_tokens.weight": (vocab, config["hidden_size"])}


def write_portable(source: Source, out: Path) -> None:
    """Writes the checkpoint as it is, for vLLM and SGLang alike, once it is known to mean the same
    in both."""
    check_sglang(source.config)
    check_sees_all(source, "SGLang")
    write_vllm(source, out)


def write_vllm(source: Source, out: Path) -> None:
    check(source)
    # SGLang leaves the layer at random values if it is called `layers.0`, before 0.5.23.
    write_weights(
        out,
        source.config,
        {portable_name(name): tensor for name, tensor in read_weights(source.draft).items()},
    )


def write_speculators(source: Source, out: Path) -> None:
    """Started as `vllm serve OUT`: the target is named inside."""
    check(source)
    write_weights(out, speculators_config(source), speculators_tensors(source.draft))


def speculators_tensors(draft: Path) -> dict[str, torch.Tensor]:
    return {
        name.replace("midlayer.", "layers.0."): tensor
        for name, tensor in read_weights(draft).items()
    }


def speculators_config(source: Source) -> dict[str, Any]:
    config = dict(source.config)
    layer = {
        key: value
        for key, value in config.items()
        if key not in ("architectures", "eagle_config", "dtype")
    }
    return {
        "architectures": ["Eagle3Speculator"],
        "speculators_model_type": "eagle3",
        "speculators_version": SPECULATORS_VERSION,
        "dtype": config.get("dtype", "float32"),
        "draft_vocab_size": config["draft_vocab_size"],
        "target_hidden_size": config["target_hidden_size"],
        # Written out even if false: a reader of this layout takes a missing one for true.
        "norm_before_residual": bool(config.get("norm_before_residual")),
        "norm_before_fc": bool(config.get("norm_before_fc")),
        "fc_norm": bool(config.get("fc_norm")),
        "norm_output": bool(config.get("norm_output")),
        "embed_requires_grad": False,
        "tie_word_embeddings": False,
        "eagle_aux_hidden_state_layer_ids": config["eagle_aux_hidden_state_layer_ids"],
        "transformer_layer_config": layer,
        "speculators_config": speculators_plan(source, "eagle3"),
    }


def speculators_plan(source: Source, algorithm: str) -> dict[str, Any]:
    """Draft length and target, which that layout has inside."""
    return {
        "algorithm": algorithm,
        "default_proposal_method": "greedy",
        "proposal_methods": [
            {"proposal_type": "greedy", "speculative_tokens": source.num_speculative_tokens}
        ],
        "verifier": {
            "name_or_path": source.target_name,
            "architectures": source.target_config["architectures"],
        },
    }


def check(source: Source, *, more: dict[str, tuple[int, ...]] | None = None) -> None:
    """Refuses a draft that an engine would load wrongly or not at all; `more` weights belong to the
    layout too."""
    config = source.config
    check_config(config)
    check_taps(config, source.target_config)
    check_target(source)
    check_names(config, tensor_shapes(source.draft), more or {})
    tensors = read_weights(source.draft)
    if "d2t" in tensors:
        check_vocab_map(config, tensors["d2t"])


def check_config(config: dict[str, Any]) -> None:
    required = (
        "architectures", "model_type", "hidden_size", "intermediate_size", "num_hidden_layers",
        "num_attention_heads",
        "num_key_value_heads", "head_dim", "hidden_act", "rms_norm_eps", "max_position_embeddings",
        "vocab_size",
        "draft_vocab_size", "tie_word_embeddings", "target_hidden_size", "num_aux_hidden_states",
        "eagle_aux_hidden_state_layer_ids", "eagle_config",
    )  # fmt: skip
    for key in required:
        if config.get(key) is None:
            raise UserError(
                f"config.json of the draft lacks {key!r}, which an engine reads; train or save "
                "the draft again"
            )
    if config["architectures"][0] not in ARCHITECTURES or config["model_type"] != "llama":
        raise UserError(
            f"architecture {config['architectures'][0]!r} is not the portable EAGLE-3 one "
            f"({ARCHITECTURES[0]})"
        )
    fixed = {"hidden_act": "silu", "tie_word_embeddings": False}
    for key, value in fixed.items():
        if config[key] != value:
            raise UserError(
                f"the draft has {key}={config[key]!r}, which the EAGLE-3 layout cannot express; "
                f"it must be {value!r}"
            )
    if config.get("attention_bias"):
        raise UserError(
            "the draft has attention_bias=True, which draftsmith does not export; train it without"
        )


def check_taps(config: dict[str, Any], target_config: dict[str, Any]) -> None:
    raw, nested = (
        config["eagle_aux_hidden_state_layer_ids"],
        config["eagle_config"].get("eagle_aux_hidden_state_layer_ids"),
    )
    if nested != [tap - 1 for tap in raw]:
        raise UserError(
            f"the draft taps layers {raw} but its eagle_config says {nested}; SGLang would read "
            "other layers than vLLM, write "
            f"{[tap - 1 for tap in raw]}"
        )
    if not config["eagle_config"].get("use_aux_hidden_state"):
        raise UserError(
            "eagle_config.use_aux_hidden_state is not true, so engines would drop fc; save the "
            "draft again"
        )
    if raw != sorted(set(raw)):
        raise UserError(
            f"the draft taps layers {raw}; engines hand the taps over in layer order, so train "
            f"with {sorted(set(raw))}"
        )
    if len(raw) != config["num_aux_hidden_states"]:
        raise UserError(
            f"the draft taps {len(raw)} layers but num_aux_hidden_states is "
            f"{config['num_aux_hidden_states']}"
        )
    layers = text_config(target_config)["num_hidden_layers"]
    if raw[0] < 1 or raw[-1] >= layers:
        raise UserError(
            f"the draft taps layers {raw} of a target with {layers}; engines can read 1 to "
            f"{layers - 1}"
        )


def check_target(source: Source) -> None:
    config = source.config
    check_fits(source, vocab_size=config["vocab_size"], hidden_size=config["target_hidden_size"])
    if "embed_tokens.weight" not in tensor_shapes(source.draft) and scales_its_embeddings(source):
        raise UserError(
            f"{source.target_name!r} scales its token embeddings, which engines do not do for a "
            "draft that shares them; "
            "save the draft with embeddings of its own"
        )


def scales_its_embeddings(source: Source) -> bool:
    """True where the target's embedding module is more than a table, found by building the model
    without weights."""
    trust = source.trust_remote_code
    config = load_config(source.target, trust_remote_code=trust)
    with torch.device("meta"):
        embedding = build_model(config, trust_remote_code=trust).get_input_embeddings()
    return type(embedding) is not torch.nn.Embedding


def check_names(
    config: dict[str, Any], shapes: dict[str, tuple[int, ...]], more: dict[str, tuple[int, ...]]
) -> None:
    named = {portable_name(name): shape for name, shape in shapes.items()}
    expected, allowed = expected_shapes(config) | more, optional_shapes(config)
    check_shapes(named, expected)
    for name, shape in named.items():
        if allowed.get(name, expected.get(name)) != shape:
            raise UserError(
                f"weight {name!r} of shape {list(shape)} has no place in the EAGLE-3 layout; "
                "remove it"
            )


def portable_name(name: str) -> str:
    return name.replace("layers.0.", "midlayer.") if name.startswith("layers.0.") else name


def check_vocab_map(config: dict[str, Any], offsets: torch.Tensor) -> None:
    """`offsets` [Vd] int64: the target's id of draft token i is i + offsets[i]."""
    ids = torch.arange(len(offsets)) + offsets
    if (
        offsets.dtype != torch.int64
        or ids.min() < 0
        or ids.max() >= config["vocab_size"]
        or len(ids.unique()) != len(ids)
    ):
        raise UserError(
            f"d2t does not map {len(offsets)} draft tokens to distinct ids below "
            f"{config['vocab_size']}; "
            "it must hold int64 offsets"
        )


def check_sglang(config: dict[str, Any]) -> None:
    if config["num_hidden_layers"] != 1:
        raise UserError(
            f"the draft has num_hidden_layers={config['num_hidden_layers']}, and SGLang norms "
            "later layers in its own way; "
            "export it --to vllm"
        )
    # SGLang 0.5.23 has the other norms that vLLM has.
    if config.get("norm_before_residual"):
        raise UserError(
            "the draft has norm_before_residual=true, which SGLang cannot express; export it --to "
            "vllm"
        )
