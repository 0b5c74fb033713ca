"""Layouts that keep the draft's own tensors. Feature heads and block drafters are the portable
checkpoint for vLLM and SGLang, once it is known to mean the same to both; a draft LM is a model
folder that any engine or transformers loads, the MLP speculator one as IBM's readers expect it, and
Medusa has the target's table, because no reader looks for it in the target.

vLLM and SGLang read the tapped layers from different keys with different meanings, ignore unknown
names (SGLang) or refuse them (vLLM), and take the taps in layer order whatever the config says: a
draft that breaks a rule is served without complaint and accepts nothing.
"""

from __future__ import annotations

import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

import torch
from safetensors.torch import save_file

from draftsmith.drafters.heads.eagle1 import ARCHITECTURES as EAGLE1
from draftsmith.drafters.heads.eagle3_layer import LLAMA
from draftsmith.drafters.init_from_target import shares_embeddings
from draftsmith.drafters.states.medusa import engine_name
from draftsmith.drafters.states.mlp import Mlp
from draftsmith.drafters.target.load import load_tokenizer
from draftsmith.drafters.vocabulary import check_same_ids
from draftsmith.drafters.weights import MEDUSA, read_weights, weight_files, write_weights
from draftsmith.errors import UserError
from draftsmith.train.export.source import (
    ExportSource,
    check_sees_all,
    copy_tokenizer,
    target_tensor,
    text_config,
    write_config,
)

OWN_TABLES = ("lm_head.weight", "embed_tokens.weight", "d2t", "mask_embedding")


def write_eagle3(source: ExportSource, out: Path) -> None:
    """P-EAGLE's too, which vLLM serves with `"method": "eagle3", "parallel_drafting": true`."""
    check_eagle3(source)
    write_portable(source, out)


def write_sglang_eagle3(source: ExportSource, out: Path) -> None:
    if source.drafter.norms.norm_before_residual:
        raise UserError(
            "the draft has norm_before_residual=true, which SGLang cannot express; export it --to "
            "vllm"
        )
    if (layers := source.drafter.config.num_hidden_layers) != 1:
        raise UserError(
            f"the draft has num_hidden_layers={layers}, and SGLang norms later layers in its own "
            "way; export it --to vllm"
        )
    check_sees_all(source, "SGLang")
    write_eagle3(source, out)


def write_block(source: ExportSource, out: Path) -> None:
    check_block(source)
    write_portable(source, out)


def write_vllm_eagle1(source: ExportSource, out: Path) -> None:
    """Its projection has no bias."""
    # Its layer counts behind the target's, past the end of the draft's own kinds.
    config, tensors = eagle1(source, "vLLM's EAGLE-1")
    bias = tensors.pop("fc.bias", None)
    if bias is not None and bool(bias.any()):
        raise UserError(
            "the draft's fc has a bias, which vLLM's EAGLE-1 cannot express; export it --to sglang"
        )
    write_weights(out, config | {"architectures": [EAGLE1[0]], "bias": False}, tensors)


def write_sglang_eagle1(source: ExportSource, out: Path) -> None:
    """Its projection has a bias."""
    config, tensors = eagle1(source, "SGLang")
    tensors.setdefault("fc.bias", torch.zeros_like(tensors["fc.weight"][:, 0]))
    write_weights(out, config | {"architectures": [EAGLE1[1]], "bias": True}, tensors)


def eagle1(source: ExportSource, engine: str) -> tuple[dict[str, Any], dict[str, torch.Tensor]]:
    check_sees_all(source, engine)
    if source.drafter.has_layernorms:
        raise UserError(
            f"the draft has layernorms=True, norms that {engine} has not; export it --to "
            "speculators"
        )
    check_layer(source)
    return source.drafter.portable_config(), source.drafter.state_dict()


def write_portable(source: ExportSource, out: Path) -> None:
    write_weights(out, source.drafter.portable_config(), source.drafter.state_dict())


def check_eagle3(source: ExportSource) -> None:
    architecture = source.drafter.portable_config()["architectures"][0]
    if architecture != LLAMA.architecture:
        raise UserError(
            f"architecture {architecture!r} is not the portable EAGLE-3 one ({LLAMA.architecture})"
        )
    check_layer(source)
    check_taps(source)


def check_block(source: ExportSource) -> None:
    if found := [name for name in OWN_TABLES if name in source.drafter.state_dict()]:
        raise UserError(f"weight {found[0]!r} has no place in layout {source.family}; remove it")
    check_layer(source)
    check_taps(source)


def check_layer(source: ExportSource) -> None:
    """A layer without biases, over embeddings that engines share with the target as they are."""
    if source.drafter.config.attention_bias:
        raise UserError(
            "the draft has attention_bias=True, which draftsmith does not export; train it without"
        )
    if source.drafter.embed_tokens is None and not shares_embeddings(source.outline):
        raise UserError(
            f"{source.target_name!r} scales its token embeddings, which engines do not do for a "
            "draft that shares them; save the draft with embeddings of its own"
        )


def check_taps(source: ExportSource) -> None:
    taps, most = list(source.drafter.taps), source.outline.num_layers - 1
    if taps != sorted(set(taps)) or taps[0] < 1 or taps[-1] > most:
        raise UserError(
            f"the draft taps layers {taps}; engines hand ascending ones from 1 to {most} over, so "
            "train with such"
        )


NUM_TAPS = 3


class Reader(NamedTuple):
    """An engine with a graph of its own for the head: one layer and `NUM_TAPS` taps. What such a
    graph leaves out is refused: the engine would draft without it and say nothing.

    Args:
        passes_over: settings that it ignores, with the draft that it would run instead.
        single: why it has one layer.
    """

    engine: str
    passes_over: Mapping[str, str]
    single: str


def check_represented(config: dict[str, Any], reader: Reader) -> None:
    """Raises `UserError` where `reader` would run another draft than `config` describes."""
    for key, instead in reader.passes_over.items():
        if config.get(key):
            raise UserError(
                f"the draft has {key}=true, which {reader.engine} passes over: {instead}; train it "
                f"with draft.{key}=false"
            )
    taps = config["eagle_aux_hidden_state_layer_ids"]
    if len(taps) != NUM_TAPS:
        raise UserError(
            f"the draft taps layers {taps}, and {reader.engine} reads exactly {NUM_TAPS}; train it "
            "with draft.taps of three layers"
        )
    if config["num_hidden_layers"] != 1:
        raise UserError(
            f"the draft has num_hidden_layers={config['num_hidden_layers']}, and {reader.engine} "
            f"{reader.single}; export it --to vllm"
        )


def write_plain(source: ExportSource, out: Path) -> None:
    check_lm(source)
    for file in weight_files(source.draft):
        shutil.copyfile(file, out / file.name)
    index = source.draft / "model.safetensors.index.json"
    if index.is_file():
        shutil.copyfile(index, out / index.name)
    write_config(out, source.config)
    copy_tokenizer(source.target, out)


def write_sglang(source: ExportSource, out: Path) -> None:
    """Its Mistral is its Llama, without a window."""
    check_sees_all(source, "SGLang")
    write_plain(source, out)


def check_lm(source: ExportSource) -> None:
    own, target = (
        text_config(source.config)["vocab_size"],
        text_config(source.target_config)["vocab_size"],
    )
    if own != target:
        raise UserError(
            f"the draft has {own} token ids and {source.target_name!r} has {target}; engines ask "
            "for the same number, so train a "
            "draft with the target's vocabulary"
        )
    if any((source.draft / name).is_file() for name in ("tokenizer.json", "tokenizer_config.json")):
        trust = source.trust_remote_code
        own, target = (
            load_tokenizer(folder, trust_remote_code=trust)
            for folder in (source.draft, source.target)
        )
        check_same_ids(own, target)
    read_weights(source.draft)  # refuses damaged and non-finite ones


def write_ibm(source: ExportSource, out: Path) -> None:
    drafter: Mlp = source.drafter
    tensors = drafter.portable_tensors()
    if drafter.tied:
        tensors = spread(tensors, drafter.max_depth)
    write_weights(out, drafter.portable_config(), tensors)


def spread(tensors: dict[str, torch.Tensor], num_predict: int) -> dict[str, torch.Tensor]:
    """Tied weights repeated at every depth: readers build all of them, and leave what they do not
    find at random values."""
    # the last one that each module has
    depths = {name.split(".")[1]: int(name.split(".")[2]) for name in sorted(tensors)}
    copies: dict[str, torch.Tensor] = {}
    for name, tensor in tensors.items():
        prefix, module, depth, *rest = name.split(".")
        last = num_predict if int(depth) == depths[module] else int(depth) + 1
        copies |= {
            ".".join([prefix, module, str(at), *rest]): tensor for at in range(int(depth), last)
        }
    return copies


TABLES = ("lm_head.weight", "model.embed_tokens.weight")


def write_vllm_medusa(source: ExportSource, out: Path) -> None:
    """The layout of vLLM up to 0.32, with one table for all heads. A block without its table would
    be served with random numbers in its place."""
    state = source.drafter.state_dict()
    tensors = {engine_name(name): tensor for name, tensor in state.items()}
    if not source.drafter.has_own_heads:
        dtype = tensors["blocks.0.layers.0.weight"].dtype
        tensors["lm_head.weight"] = target_table(source).to(dtype)
    write_weights(out, source.drafter.portable_config(), tensors)


def write_medusa(source: ExportSource, out: Path) -> None:
    """The original layout of FasterDecoding, TGI and TensorRT-LLM, with a table for each head."""
    drafter, written = source.drafter, dict[str, torch.Tensor]()
    table = None if drafter.has_own_heads else target_table(source)
    for head, blocks in enumerate(drafter.heads):
        for layer, block in enumerate(blocks):
            weight, bias = block.linear.weight.detach(), block.linear.bias
            written |= {
                f"{head}.{layer}.linear.weight": weight,
                # The layout's blocks always have a bias.
                f"{head}.{layer}.linear.bias": (
                    torch.zeros_like(weight[:, 0]) if bias is None else bias.detach()
                ),
            }
        own = drafter.tables[head].weight.detach() if table is None else table.to(weight.dtype)
        written[f"{head}.{len(blocks)}.weight"] = own.clone()
    save_file(written, out / MEDUSA[0], metadata={"format": "pt"})
    config = {
        "medusa_num_heads": drafter.max_depth,
        "medusa_num_layers": drafter.num_layers,
        "base_model_name_or_path": source.target_name,
    }
    write_config(out, config)


def target_table(source: ExportSource) -> torch.Tensor:
    """[V, H], the target's output table: its own, or the embeddings it is tied to."""
    tied = bool(text_config(source.target_config).get("tie_word_embeddings"))
    return target_tensor(source, TABLES[tied])
