"""GGUF files for llama.cpp: causal LMs of Llama's and Qwen's kinds (a draft LM, the target of any
draft), EAGLE-3, DFlash and DSpark, with the names that its decoders of Llama's build have in
common."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from types import ModuleType
from typing import Any, NamedTuple

import torch
from transformers import PreTrainedConfig
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

from draftsmith.drafters.blocks.shape import BlockShape
from draftsmith.drafters.target.load import load_config
from draftsmith.drafters.weights import read_weights
from draftsmith.errors import UserError, missing
from draftsmith.train.export import portable
from draftsmith.train.export.gguf_vocabulary import vocabulary
from draftsmith.train.export.portable import Reader, check_block, check_eagle3, check_represented
from draftsmith.train.export.source import ExportSource, check_sees_all


class TensorKind(NamedTuple):
    arch: str
    interleaves: bool  # whether llama.cpp turns neighbouring values of a head


KINDS = {
    "llama": TensorKind("llama", True),
    "mistral": TensorKind("llama", True),
    "qwen2": TensorKind("qwen2", False),
    "qwen3": TensorKind("qwen3", False),
}


def write_lm(source: ExportSource, out: Path) -> None:
    portable.check_lm(source)
    write_model(source.draft, source, out / DRAFT)
    write_target(source, out)


def write_target(source: ExportSource, out: Path) -> None:
    if source.with_target:
        write_model(source.target, source, out / TARGET)


def write_model(folder: Path, source: ExportSource, path: Path) -> None:
    """The causal LM in `folder`, with the target's vocabulary."""
    trust = source.trust_remote_code
    config = load_config(folder, trust_remote_code=trust)
    if config.model_type not in KINDS:
        raise UserError(
            f"{str(folder)!r} is of kind {config.model_type!r}, and draftsmith writes "
            f"{', '.join(KINDS)} to GGUF; convert it with llama.cpp's own convert_hf_to_gguf.py"
        )
    kind = KINDS[config.model_type]
    check_layers(config)
    tensors = named(
        {name.removeprefix("model."): tensor for name, tensor in read_weights(folder).items()}
    )
    if config.tie_word_embeddings:
        tensors.pop("output.weight", None)
    values = shape_values(config)
    if kind.interleaves:
        tensors = interleaved(tensors, values)
    words = vocabulary(source.target, config.vocab_size, trust_remote_code=trust)
    content = Gguf(kind.arch, values | words, tensors | rope_factors(config))
    write_gguf(path, content, name=folder.name)


DRAFT, TARGET = "draft.gguf", "target.gguf"
TOKENIZER = "tokenizer."
# Kinds of a whole file, as llama.cpp counts them.
FILE_TYPES = {torch.float32: 0, torch.float16: 1, torch.bfloat16: 32}


class Gguf(NamedTuple):
    arch: str
    values: dict[str, Any]  # metadata; keys of the architecture without its prefix
    tensors: dict[str, torch.Tensor]


def library() -> ModuleType:
    try:
        import gguf
    except ImportError as error:
        raise missing("export --to gguf", "gguf", "gguf") from error
    return gguf


def write_gguf(path: Path, content: Gguf, *, name: str) -> None:
    """`name` is shown by engines. Vectors are stored as float32, which llama.cpp's norms and biases
    are; matrices keep their type."""
    gguf = library()
    writer = gguf.GGUFWriter(path, content.arch)
    writer.add_string("general.name", name)
    writer.add_uint32("general.file_type", file_type(content.tensors))
    for key, value in content.values.items():
        full = key if key.startswith(TOKENIZER) else f"{content.arch}.{key}"
        adder(writer, value)(full, value)
    for tensor_name, tensor in content.tensors.items():
        stored = tensor.float() if tensor.ndim == 1 and tensor.is_floating_point() else tensor
        stored = stored.contiguous().cpu()
        if stored.dtype == torch.bfloat16:
            raw = stored.view(torch.uint8).numpy()
            writer.add_tensor(tensor_name, raw, raw_dtype=gguf.GGMLQuantizationType.BF16)
        else:
            writer.add_tensor(tensor_name, stored.numpy())
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def file_type(tensors: Mapping[str, torch.Tensor]) -> int:
    """The type of the largest matrix."""
    largest = max(
        (tensor for tensor in tensors.values() if tensor.ndim > 1),
        key=lambda tensor: tensor.numel(),
    )
    if largest.dtype not in FILE_TYPES:
        raise UserError(
            f"weights of type {str(largest.dtype).removeprefix('torch.')} are not written to GGUF; "
            "save the model in float32, float16 or bfloat16"
        )
    return FILE_TYPES[largest.dtype]


def adder(writer: Any, value: Any) -> Callable[[str, Any], None]:
    adders = {
        bool: writer.add_bool,
        int: writer.add_uint32,
        float: writer.add_float32,
        str: writer.add_string,
        list: writer.add_array,
    }
    return adders[type(value)]


# Modules of a decoder layer.
LAYER = {
    "input_layernorm": "attn_norm",
    "hidden_norm": "attn_norm_2",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "self_attn.q_norm": "attn_q_norm",
    "self_attn.k_norm": "attn_k_norm",
    "post_attention_layernorm": "ffn_norm",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
}
OUTSIDE = {"embed_tokens": "token_embd", "norm": "output_norm", "lm_head": "output"}
# Rotary embeddings whose factors are the same at every length and that scale nothing else.
FIXED_ROPE = ("default", "linear", "llama3")


def shape_values(config: PreTrainedConfig) -> dict[str, Any]:
    heads = config.num_attention_heads
    width = getattr(config, "head_dim", None) or config.hidden_size // heads
    return {
        "block_count": config.num_hidden_layers,
        "context_length": config.max_position_embeddings,
        "embedding_length": config.hidden_size,
        "feed_forward_length": config.intermediate_size,
        "vocab_size": config.vocab_size,
        "attention.head_count": heads,
        "attention.head_count_kv": config.num_key_value_heads,
        "attention.key_length": width,
        "attention.value_length": width,
        "attention.layer_norm_rms_epsilon": float(config.rms_norm_eps),
        "rope.dimension_count": width,
        "rope.freq_base": float(config.rope_parameters["rope_theta"]),
    }


def check_layers(config: PreTrainedConfig) -> None:
    """Raises `UserError` for what these decoders have and llama.cpp's architectures have not."""
    if config.hidden_act != "silu":
        raise UserError(
            f"the model has hidden_act={config.hidden_act!r}, where llama.cpp's decoder of this "
            "kind has 'silu'; convert the pair with llama.cpp's own convert_hf_to_gguf.py"
        )
    if "sliding_attention" in (getattr(config, "layer_types", None) or ()) or (
        config.model_type == "mistral" and config.sliding_window
    ):
        raise UserError(
            f"the model has layers with a window of {config.sliding_window} tokens, which "
            "draftsmith does not write to GGUF; convert it with llama.cpp's own "
            "convert_hf_to_gguf.py"
        )


def rope_factors(config: PreTrainedConfig) -> dict[str, torch.Tensor]:
    """`rope_freqs` [D / 2], by which llama.cpp divides the plain frequencies; none where they are
    plain."""
    kind = config.rope_parameters.get("rope_type", "default")
    if kind not in FIXED_ROPE or config.rope_parameters.get("partial_rotary_factor", 1) != 1:
        raise UserError(
            f"the model has rotary embeddings of type {kind!r}, which draftsmith does not write "
            f"to GGUF ({', '.join(FIXED_ROPE)} it does); convert the pair with llama.cpp's own "
            "convert_hf_to_gguf.py"
        )
    if kind == "default":
        return {}
    scaled, _ = ROPE_INIT_FUNCTIONS[kind](config, torch.device("cpu"))
    steps = torch.arange(len(scaled), dtype=torch.float32) / len(scaled)
    plain = config.rope_parameters["rope_theta"] ** -steps
    return {"rope_freqs.weight": plain / scaled}


def layer_name(name: str) -> str | None:
    """`layers.2.mlp.up_proj.weight` -> `blk.2.ffn_up.weight`; None for no part of a layer."""
    parts = name.split(".")
    if parts[0] != "layers" or len(parts) < 4:
        return None
    module, kind = ".".join(parts[2:-1]), parts[-1]
    return f"blk.{parts[1]}.{LAYER[module]}.{kind}" if module in LAYER else None


def outside_name(name: str, more: Mapping[str, str]) -> str | None:
    module, _, kind = name.rpartition(".")
    known = {**OUTSIDE, **more}
    return f"{known[module]}.{kind}" if module in known else None


def named(
    tensors: Mapping[str, torch.Tensor], more: Mapping[str, str] | None = None
) -> dict[str, torch.Tensor]:
    """Tensors of a decoder by llama.cpp's names; `more` modules stand outside of its layers."""
    found = {}
    for name, tensor in tensors.items():
        own = layer_name(name) or outside_name(name, more or {})
        if own is None:
            raise UserError(
                f"weight {name!r} has no place in llama.cpp's decoder of this kind; convert the "
                "pair with llama.cpp's own convert_hf_to_gguf.py"
            )
        found[own] = tensor
    return found


def interleaved(
    tensors: Mapping[str, torch.Tensor], values: Mapping[str, Any]
) -> dict[str, torch.Tensor]:
    """Rows of queries and keys in the order of llama.cpp's Llama: the two halves of a head, which
    transformers turns against each other, one by one."""
    heads = {"attn_q": values["attention.head_count"], "attn_k": values["attention.head_count_kv"]}
    return {
        name: interleave(tensor, heads[part]) if (part := part_of(name)) in heads else tensor
        for name, tensor in tensors.items()
    }


def part_of(name: str) -> str:
    return name.split(".")[-2] if name.startswith("blk.") else ""


def interleave(weight: torch.Tensor, heads: int) -> torch.Tensor:
    rows = weight.shape[0]
    halves = weight.reshape(heads, 2, rows // heads // 2, *weight.shape[1:])
    return halves.transpose(1, 2).reshape(weight.shape)


def absolute_ids(offsets: torch.Tensor) -> torch.Tensor:
    """d2t as llama.cpp reads it: the target's id of every draft token, int64 [Vd]."""
    return torch.arange(len(offsets)) + offsets


def without(tensors: Mapping[str, torch.Tensor], names: Iterable[str]) -> dict[str, torch.Tensor]:
    left_out = set(names)
    return {name: tensor for name, tensor in tensors.items() if name not in left_out}


READER = Reader(
    "llama.cpp",
    passes_over={
        "norm_output": "it would feed the state back without its norm and lose later depths",
        "fc_norm": "it would join the taps without their norms",
    },
    single="runs one layer",
)


def write_eagle3(source: ExportSource, out: Path) -> None:
    """One layer, three taps, and no norm that llama.cpp lacks."""
    check_eagle3(source)
    written, config = source.drafter.portable_config(), source.drafter.config
    check_represented(written, READER)
    check_sees_all(source, READER.engine)
    values = shape_values(config) | {
        "target_layers": written["eagle_aux_hidden_state_layer_ids"],
        "target_hidden_size": written["target_hidden_size"],
        "norm_before_residual": written["norm_before_residual"],
        "norm_before_fc": written["norm_before_fc"],
    }
    stored = {
        name.replace("midlayer.", "layers.0."): tensor
        for name, tensor in source.drafter.state_dict().items()
    }
    tensors = named(without(stored, ("d2t", "t2d")), {"fc": "fc", "input_norm": "enc.output_norm"})
    tensors = interleaved(tensors, values) | rope_factors(config)
    if "d2t" in stored:
        tensors["d2t"] = absolute_ids(stored["d2t"])
    words = vocabulary(source.target, config.vocab_size, trust_remote_code=source.trust_remote_code)
    write_gguf(out / DRAFT, Gguf("eagle3", values | words, tensors), name=source.draft.name)
    write_target(source, out)


BLOCK_MODULES = {
    "fc": "fc",
    "hidden_norm": "enc.output_norm",
    "markov_head.markov_w1": "markov_w1",
    "markov_head.markov_w2": "markov_w2",
    "confidence_head.proj": "conf_proj",
}


def write_block(source: ExportSource, out: Path) -> None:
    """DFlash and DSpark are one architecture, where a table of transitions makes the difference."""
    check_block(source)
    shape, config = source.drafter.shape, source.drafter.config
    check_block_represented(shape)
    values = shape_values(config) | {
        # Layers are counted by their inputs.
        "target_layers": list(source.drafter.taps),
        "block_size": shape.block_size,
        "attention.causal": shape.causal,
        "tokenizer.ggml.mask_token_id": shape.mask_token,
    }
    if shape.markov_rank:
        values |= {"sample_from_anchor": True, "has_confidence_head": bool(shape.confidence)}
    tensors = named(source.drafter.state_dict(), BLOCK_MODULES) | rope_factors(config)
    words = vocabulary(source.target, config.vocab_size, trust_remote_code=source.trust_remote_code)
    write_gguf(out / DRAFT, Gguf("dflash", values | words, tensors), name=source.draft.name)
    write_target(source, out)


def check_block_represented(shape: BlockShape) -> None:
    if any(shape.windows):
        raise UserError(
            "the draft has layers with a window, which draftsmith does not write to GGUF; "
            "convert it with llama.cpp's own convert_hf_to_gguf.py"
        )
    if shape.confidence == "state":
        raise UserError(
            "the draft's confidence head reads no transition (confidence_head_with_markov is "
            "false), and llama.cpp's does; export it --to vllm"
        )
