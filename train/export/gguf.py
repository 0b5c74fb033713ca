"""GGUF files for llama.cpp: causal LMs of Llama's and Qwen's kinds (a draft LM, the target of any
draft), EAGLE-3, DFlash and DSpark, with the names that its decoders of Llama's build have in
common."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from pathlib import Path
from types import ModuleType
from typing import Any, NamedTuple

import torch
from transformers import PreTrainedConfig, PreTrainedTokenizerBase
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

from draftsmith.drafters.blocks.shape import BlockShape
from draftsmith.drafters.target.load import load_config, load_tokenizer
from draftsmith.drafters.weights import read_weights
from draftsmith.errors import UserError, missing
from draftsmith.train.export import portable
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


def write_target(source: ExportSource, out: Path) -> None:
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
    tensors = named(read_weights(folder))
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


def named(
    tensors: Mapping[str, torch.Tensor], more: Mapping[str, str] = {}
) -> dict[str, torch.Tensor]:
    """Tensors of a decoder by llama.cpp's names, those of Qwen3's, which has what all have; `more`
    are those of other modules."""
    gguf = library()
    known = gguf.get_tensor_name_map(gguf.MODEL_ARCH.QWEN3, len(tensors))
    found = {}
    for name, tensor in tensors.items():
        module, _, kind = name.rpartition(".")
        whole = module if module.startswith(("model.", "lm_head")) else f"model.{module}"
        own = more.get(module) or known.get_name(whole)
        if own is None:
            raise UserError(
                f"weight {name!r} has no place in llama.cpp's decoder of this kind; convert the "
                "pair with llama.cpp's own convert_hf_to_gguf.py"
            )
        found[f"{own}.{kind}"] = tensor
    return found


def interleaved(
    tensors: Mapping[str, torch.Tensor], values: Mapping[str, Any]
) -> dict[str, torch.Tensor]:
    """Rows of queries and keys in the order of llama.cpp's Llama: the two halves of a head, which
    transformers turns against each other, one by one."""
    heads = {"attn_q": values["attention.head_count"], "attn_k": values["attention.head_count_kv"]}
    return {
        name: interleave(tensor, heads[part]) if (part := name.split(".")[-2]) in heads else tensor
        for name, tensor in tensors.items()
    }


def interleave(weight: torch.Tensor, heads: int) -> torch.Tensor:
    rows = weight.shape[0]
    halves = weight.reshape(heads, 2, rows // heads // 2, *weight.shape[1:])
    return halves.transpose(1, 2).reshape(weight.shape)


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
    stored = dict(source.drafter.state_dict())
    offsets = stored.pop("d2t", None)
    stored.pop("t2d", None)
    stored = {name.replace("midlayer.", "layers.0."): one for name, one in stored.items()}
    tensors = interleaved(named(stored, EAGLE3_MODULES), values)
    if offsets is not None:  # llama.cpp reads the target's id of every draft token
        tensors["d2t"] = torch.arange(len(offsets)) + offsets
    write_draft(source, out, "eagle3", values, tensors)


def write_draft(
    source: ExportSource,
    out: Path,
    arch: str,
    values: dict[str, Any],
    tensors: dict[str, torch.Tensor],
) -> None:
    config = source.drafter.config
    words = vocabulary(source.target, config.vocab_size, trust_remote_code=source.trust_remote_code)
    content = Gguf(arch, values | words, tensors | rope_factors(config))
    write_gguf(out / DRAFT, content, name=source.draft.name)


EAGLE3_MODULES = {
    "fc": "fc",
    "input_norm": "enc.output_norm",
    "layers.0.hidden_norm": "blk.0.attn_norm_2",
}
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
    tensors = named(source.drafter.state_dict(), BLOCK_MODULES)
    write_draft(source, out, "dflash", values, tensors)


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


# Of a token. Tokens are those of a byte-level BPE, with the name of the rule by which llama.cpp
# splits a text before its merges.
NORMAL, CONTROL, USER_DEFINED, UNUSED = 1, 3, 4, 5

ENGLISH = "(?i:'s|'t|'re|'ve|'m|'ll|'d)"
WORDS_AND_SPACES = r" ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
CASED = (
    r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+{END}|"
    r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+[\p{Ll}\p{Lm}\p{Lo}\p{M}]*{END}|"
)
REST = r" ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
# The steps of a tokenizer.json before its merges -> llama.cpp's name of the same rule.
RULES: dict[tuple[str, ...], str] = {
    ("bytes by words",): "gpt-2",
    ("digits", "bytes by words"): "smollm",
    (ENGLISH + r"|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}|" + WORDS_AND_SPACES, "bytes"): "llama-bpe",
    (ENGLISH + r"|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}|" + WORDS_AND_SPACES, "bytes"): "qwen2",
    (
        ENGLISH
        + r"|[^\r\n\p{L}\p{N}]?[\p{L}\p{M}]+|\p{N}| ?[^\s\p{L}\p{M}\p{N}]+[\r\n]*"
        + r"|\s*[\r\n]+|\s+(?!\S)|\s+",
        "bytes",
    ): "qwen35",
    (CASED.replace("{END}", "") + r"\p{N}|" + REST, "bytes"): "tekken",
    (CASED.replace("{END}", ENGLISH + "?") + r"\p{N}{1,3}|" + REST, "bytes"): "gpt-4o",
}
SPECIAL = {"bos": "bos", "eos": "eos", "padding": "pad", "unknown": "unk"}


def vocabulary(folder: Path, size: int, *, trust_remote_code: bool) -> dict[str, Any]:
    """Metadata of the tokenizer of `folder`, filled up to the `size` rows of the embeddings."""
    tokenizer = load_tokenizer(folder, trust_remote_code=trust_remote_code)
    written = backend(tokenizer, folder)
    tokens, kinds = tokens_and_kinds(tokenizer, size)
    values: dict[str, Any] = {
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.pre": rule_of(written, folder),
        "tokenizer.ggml.tokens": tokens,
        "tokenizer.ggml.token_type": kinds,
        "tokenizer.ggml.merges": [
            merge if isinstance(merge, str) else " ".join(merge)
            for merge in written["model"]["merges"]
        ],
        **added_around(tokenizer),
    }
    for key, name in SPECIAL.items():
        if (token := getattr(tokenizer, f"{name}_token_id", None)) is not None:
            values[f"tokenizer.ggml.{key}_token_id"] = token
    if isinstance(template := getattr(tokenizer, "chat_template", None), str):
        values["tokenizer.chat_template"] = template
    return values


def backend(tokenizer: PreTrainedTokenizerBase, folder: Path) -> dict[str, Any]:
    """Contents of its tokenizer.json."""
    inner = getattr(tokenizer, "backend_tokenizer", None)
    if inner is None:
        raise _no_bpe(folder, type(tokenizer).__name__)
    return json.loads(inner.to_str())


def _no_bpe(folder: Path, found: str) -> UserError:
    return UserError(
        f"the tokenizer of {str(folder)!r} is no byte-level BPE that draftsmith writes to GGUF "
        f"({found}); convert the pair with llama.cpp's own convert_hf_to_gguf.py"
    )


def rule_of(written: dict[str, Any], folder: Path) -> str:
    model = written["model"]
    if model["type"] != "BPE" or model.get("byte_fallback"):
        raise _no_bpe(folder, f"model {model['type']} with bytes of its own")
    steps = written.get("pre_tokenizer") or {}
    listed = steps["pretokenizers"] if steps.get("type") == "Sequence" else [steps]
    rule = tuple(step_name(step) for step in listed)
    if rule not in RULES:
        raise _no_bpe(folder, f"texts are split by {' then '.join(rule)}")
    return RULES[rule]


def step_name(step: dict[str, Any]) -> str:
    kind = step.get("type", "nothing")
    if kind == "ByteLevel" and not step.get("add_prefix_space"):
        return "bytes by words" if step.get("use_regex", True) else "bytes"
    if kind == "Digits" and step.get("individual_digits"):
        return "digits"
    if kind == "Split" and step.get("behavior") == "Isolated" and not step.get("invert"):
        return step["pattern"].get("Regex", kind)
    return kind


def tokens_and_kinds(tokenizer: PreTrainedTokenizerBase, size: int) -> tuple[list[str], list[int]]:
    by_id = {index: token for token, index in tokenizer.get_vocab().items()}
    if (highest := max(by_id)) >= size:
        raise UserError(
            f"the tokenizer has a token of id {highest} and the model has {size} rows; restore "
            "the tokenizer's files"
        )
    added = tokenizer.added_tokens_decoder
    tokens, kinds = [], []
    for index in range(size):
        tokens.append(by_id.get(index, f"[PAD{index}]"))
        if index not in by_id:
            kinds.append(UNUSED)
        elif index not in added:
            kinds.append(NORMAL)
        else:
            kinds.append(CONTROL if added[index].special else USER_DEFINED)
    return tokens, kinds


def added_around(tokenizer: PreTrainedTokenizerBase) -> dict[str, bool]:
    """Flags of the tokens that begin and end every text."""
    bare, whole = (tokenizer.encode("a", add_special_tokens=added) for added in (False, True))
    begins = whole[: len(whole) - len(bare)] if whole[-len(bare) :] == bare else whole
    return {
        "tokenizer.ggml.add_bos_token": bool(begins) and begins[0] == tokenizer.bos_token_id,
        "tokenizer.ggml.add_eos_token": whole[-1] == tokenizer.eos_token_id,
    }
