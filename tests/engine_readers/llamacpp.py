"""llama.cpp's reading of GGUF files (b11434): which tensors its loaders ask for, of which sizes, by
the metadata alone."""

from __future__ import annotations

from pathlib import Path
from types import ModuleType
from typing import Any

import torch
from transformers import AutoModelForCausalLM

from draftsmith.train.export.gguf import DRAFT, TOKENIZER, Gguf, library
from draftsmith.train.export.source import text_config
from tests.engine_readers.understood import Shapes, Understood, filled

NAME = "llama.cpp"
# Modules of a layer, by the names that its loaders give them.
MATRICES = {
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
NORMS = {
    "attn_norm": "input_layernorm",
    "attn_norm_2": "hidden_norm",
    "ffn_norm": "post_attention_layernorm",
    "attn_q_norm": "self_attn.q_norm",
    "attn_k_norm": "self_attn.k_norm",
}
OUTSIDE = {"token_embd": "embed_tokens", "output_norm": "norm", "output": "lm_head"}
MASK = "tokenizer.ggml.mask_token_id"


def read_gguf(path: Path) -> Gguf:
    gguf = library()
    reader = gguf.GGUFReader(path)
    values = {name: field.contents() for name, field in reader.fields.items()}
    arch = values["general.architecture"]
    return Gguf(
        arch,
        {
            key.removeprefix(f"{arch}."): value
            for key, value in values.items()
            if key.startswith((f"{arch}.", TOKENIZER))
        },
        {tensor.name: tensor_of(gguf, tensor) for tensor in reader.tensors},
    )


def tensor_of(gguf: ModuleType, stored: Any) -> torch.Tensor:
    """A copy of it: the file is mapped only as long as its reader lives."""
    data = torch.from_numpy(stored.data.copy())
    shape = [int(size) for size in reversed(stored.shape)]
    if stored.tensor_type == gguf.GGMLQuantizationType.BF16:
        data = data.view(torch.bfloat16)
    return data.reshape(shape)


def read_draft_lm(folder: Path, target_config: dict[str, Any]) -> Understood:
    """A model of its own, of the target's vocabulary; transformers reads the file."""
    check_vocabulary(read_gguf(folder / DRAFT), target_config)
    model = AutoModelForCausalLM.from_pretrained(folder, gguf_file=DRAFT, dtype=torch.float32)
    tensors = model.state_dict()
    if model.config.tie_word_embeddings:
        del tensors["lm_head.weight"]
    return Understood(model.config.to_dict(), tensors)


def read_eagle3(folder: Path, target_config: dict[str, Any]) -> Understood:
    content = read_gguf(folder / DRAFT)
    assert content.arch == "eagle3"
    check_vocabulary(content, target_config)
    values, config = content.values, own_config(content)
    taps = checked_taps(values.get("target_layers") or [], target_config)
    assert len(taps) == 3 and config["num_hidden_layers"] == 1
    hidden, width = config["hidden_size"], values["target_hidden_size"]
    joined = 3 * width
    rows = len(content.tensors["d2t"]) if "d2t" in content.tensors else config["vocab_size"]
    shapes: Shapes = {"fc.weight": (hidden, joined), "output_norm.weight": (hidden,)}
    shapes |= layer_shapes(0, config, norms=("attn_norm", "attn_norm_2", "ffn_norm"), wide=True)
    if values.get("norm_before_fc"):
        shapes["enc.output_norm.weight"] = (joined,)
    if rows != config["vocab_size"]:
        shapes["d2t"] = (rows,)
    optional: Shapes = {
        "output.weight": (rows, hidden),
        "token_embd.weight": (config["vocab_size"], hidden),
    }
    loaded = filled(NAME, content.tensors, shapes, optional=optional | rope_shape(config))
    tensors = own_names(loaded, config, {"fc": "fc", "enc.output_norm": "input_norm"}, turned=True)
    tensors = {name.replace("layers.0.", "midlayer."): t for name, t in tensors.items()}
    if "d2t" in loaded:
        tensors["d2t"] = loaded["d2t"] - torch.arange(rows)
    more = {
        "architectures": ["LlamaForCausalLMEagle3"],
        "model_type": "llama",
        "draft_vocab_size": rows,
        "target_hidden_size": width,
        "num_aux_hidden_states": 3,
        "eagle_aux_hidden_state_layer_ids": taps,
        "norm_before_residual": values.get("norm_before_residual", False),
        "norm_before_fc": values.get("norm_before_fc", False),
        "tie_word_embeddings": False,
    }
    return Understood(config | more | rope(content, loaded, config), tensors)


def read_dflash(folder: Path, target_config: dict[str, Any]) -> Understood:
    content = read_gguf(folder / DRAFT)
    assert "markov_w1.weight" not in content.tensors
    return read_block(content, target_config, "DFlashDraftModel")


def read_dspark(folder: Path, target_config: dict[str, Any]) -> Understood:
    content = read_gguf(folder / DRAFT)
    assert "markov_w1.weight" in content.tensors
    assert content.values.get("sample_from_anchor", True)
    return read_block(content, target_config, "Qwen3DSparkModel")


def read_block(content: Gguf, target_config: dict[str, Any], architecture: str) -> Understood:
    assert content.arch == "dflash"
    check_vocabulary(content, target_config)
    values, config = content.values, own_config(content)
    taps = checked_taps(values.get("target_layers") or [], target_config)
    hidden, vocab = config["hidden_size"], config["vocab_size"]
    shapes: Shapes = {
        "fc.weight": (hidden, len(taps) * hidden),
        "enc.output_norm.weight": (hidden,),
        "output_norm.weight": (hidden,),
    }
    for layer in range(config["num_hidden_layers"]):
        norms = ("attn_norm", "ffn_norm", "attn_q_norm", "attn_k_norm")
        shapes |= layer_shapes(layer, config, norms=norms)
    rank, optional = 0, rope_shape(config)
    if "markov_w1.weight" in content.tensors:
        rank = content.tensors["markov_w1.weight"].shape[1]
        shapes |= {"markov_w1.weight": (vocab, rank), "markov_w2.weight": (vocab, rank)}
        optional |= {"conf_proj.weight": (1, hidden + rank), "conf_proj.bias": (1,)}
    loaded = filled(NAME, content.tensors, shapes, optional=optional)
    tensors = own_names(loaded, config, BLOCK_NAMES, turned=False)
    # Not causal where the file does not say.
    settings = {
        "mask_token_id": values[MASK],
        "target_layer_ids": [tap - 1 for tap in taps],
        "causal": values.get("attention.causal", False),
        "sample_from_anchor": rank > 0,
    }
    more = {
        "architectures": [architecture],
        "model_type": "qwen3",
        "block_size": values.get("block_size", 16),
        "target_hidden_size": hidden,
        "tie_word_embeddings": False,
        "dflash_config": settings,
        "markov_rank": rank,
        "enable_confidence_head": "conf_proj.weight" in loaded,
        "confidence_head_with_markov": True,
        **(settings if rank else {}),
    }
    return Understood(config | more | rope(content, loaded, config), tensors)


BLOCK_NAMES = {
    "fc": "fc",
    "enc.output_norm": "hidden_norm",
    "markov_w1": "markov_head.markov_w1",
    "markov_w2": "markov_head.markov_w2",
    "conf_proj": "confidence_head.proj",
}


def check_vocabulary(content: Gguf, target_config: dict[str, Any]) -> None:
    tokens = len(content.values["tokenizer.ggml.tokens"])
    assert tokens == text_config(target_config)["vocab_size"]


def checked_taps(taps: list[int], target_config: dict[str, Any]) -> list[int]:
    """Layers whose inputs are taken, in the order in which the file has them."""
    layers = text_config(target_config)["num_hidden_layers"]
    assert taps and min(taps) >= 0 and max(taps) < layers
    return taps


def own_config(content: Gguf) -> dict[str, Any]:
    values = content.values
    return {
        "hidden_size": values["embedding_length"],
        "intermediate_size": values["feed_forward_length"],
        "num_hidden_layers": values["block_count"],
        "num_attention_heads": (heads := values["attention.head_count"]),
        "num_key_value_heads": values.get("attention.head_count_kv", heads),
        "head_dim": values.get("attention.key_length", values["embedding_length"] // heads),
        "hidden_act": "silu",
        "rms_norm_eps": values["attention.layer_norm_rms_epsilon"],
        "max_position_embeddings": values["context_length"],
        "vocab_size": len(values["tokenizer.ggml.tokens"]),
    }


def rope_shape(config: dict[str, Any]) -> Shapes:
    return {"rope_freqs.weight": (config["head_dim"] // 2,)}


def rope(content: Gguf, loaded: dict[str, torch.Tensor], config: dict[str, Any]) -> dict[str, Any]:
    """The whole head is turned; the frequencies of `rope_freqs` are divided by it."""
    assert content.values.get("rope.dimension_count", config["head_dim"]) == config["head_dim"]
    parameters: dict[str, Any] = {"rope_theta": content.values.get("rope.freq_base", 10000.0)}
    if "rope_freqs.weight" in loaded:
        factors = loaded["rope_freqs.weight"].tolist()
        parameters |= {
            "rope_type": "longrope",
            "short_factor": factors,
            "long_factor": factors,
            "factor": 1.0,
            "attention_factor": 1.0,
            "original_max_position_embeddings": config["max_position_embeddings"],
        }
    return {"rope_parameters": {"rope_type": "default", **parameters}}


def layer_shapes(
    layer: int, config: dict[str, Any], *, norms: tuple[str, ...], wide: bool = False
) -> Shapes:
    hidden, inner, width = config["hidden_size"], config["intermediate_size"], config["head_dim"]
    queries, keys = config["num_attention_heads"] * width, config["num_key_value_heads"] * width
    read = 2 * hidden if wide else hidden
    shapes: Shapes = {
        "attn_q": (queries, read),
        "attn_k": (keys, read),
        "attn_v": (keys, read),
        "attn_output": (hidden, queries),
        "ffn_gate": (inner, hidden),
        "ffn_up": (inner, hidden),
        "ffn_down": (hidden, inner),
    }
    heads = ("attn_q_norm", "attn_k_norm")
    shapes |= {name: (width,) if name in heads else (hidden,) for name in norms}
    return {f"blk.{layer}.{name}.weight": shape for name, shape in shapes.items()}


def own_names(
    loaded: dict[str, torch.Tensor],
    config: dict[str, Any],
    more: dict[str, str] | None = None,
    *,
    turned: bool,
) -> dict[str, torch.Tensor]:
    heads = {"attn_q": config["num_attention_heads"], "attn_k": config["num_key_value_heads"]}
    found = {}
    for name, tensor in loaded.items():
        module, _, kind = name.rpartition(".")
        parts = module.split(".")
        if parts[0] == "blk":
            if turned and parts[2] in heads:
                tensor = halves(tensor, heads[parts[2]])
            own = {**MATRICES, **NORMS}[parts[2]]
            found[f"layers.{parts[1]}.{own}.{kind}"] = tensor
        elif module in (outside := {**OUTSIDE, **(more or {})}):
            found[f"{outside[module]}.{kind}"] = tensor
    return found


def halves(weight: torch.Tensor, heads: int) -> torch.Tensor:
    """Rows (pair, which of the two) of each head -> transformers' (which, pair)."""
    pairs = weight.unflatten(0, (heads, -1, 2))
    return pairs.transpose(1, 2).flatten(0, 2)
