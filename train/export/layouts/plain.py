"""Layouts that keep the draft's own tensors: a draft LM as a model folder that any engine or
transformers loads, the MLP speculator as IBM's readers expect it, and Medusa with the target's
table, because no reader looks for it in the target."""

from __future__ import annotations

import shutil
from pathlib import Path

import torch
from safetensors.torch import save_file

from draftsmith.drafters.states.medusa import engine_name
from draftsmith.drafters.states.mlp import Mlp
from draftsmith.drafters.states.mlp_lstm import MlpLstm
from draftsmith.drafters.target.load import load_tokenizer
from draftsmith.drafters.vocabulary import check_same_ids
from draftsmith.drafters.weights import MEDUSA, read_weights, write_weights
from draftsmith.errors import UserError
from draftsmith.train.export.layouts.source import (
    ExportSource,
    check_sees_all,
    copy_tokenizer,
    target_tensor,
    text_config,
    weight_files,
    write_config,
)


def write_plain(source: ExportSource, out: Path) -> None:
    check(source)
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


def check(source: ExportSource) -> None:
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
    if isinstance(source.drafter, MlpLstm):
        raise UserError(
            "the draft is an LSTM speculator, which is served from the folder it came in; use that"
        )
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
