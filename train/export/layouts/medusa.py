"""Medusa as vLLM up to 0.32 reads it, with one table for all heads, and in the original layout of
FasterDecoding, TGI and TensorRT-LLM, with a table for each. Both need the target's table written
out, because neither looks for it in the target.
"""

from __future__ import annotations

from pathlib import Path

import torch
from safetensors import safe_open
from safetensors.torch import save_file

from draftsmith.drafters.states.medusa import numbers_of, own_name
from draftsmith.drafters.weights import MEDUSA, read_weights, write_weights
from draftsmith.errors import UserError
from draftsmith.train.export.layouts.source import Source, text_config, weight_files, write_config

TABLES = ("lm_head.weight", "model.embed_tokens.weight")


def write_vllm(source: Source, out: Path) -> None:
    """A block without its table would be served with random numbers in its place."""
    tensors = read_weights(source.draft)
    numbers_of(source.config, map(own_name, tensors), source.draft)
    if source.config.get("model_type") != "medusa":
        raise UserError(
            "the draft is in Medusa's original layout, which vLLM reads as it is; serve it "
            "without an export"
        )
    if source.config.get("original_lm_head"):
        tensors["lm_head.weight"] = target_table(source).to(
            tensors["blocks.0.layers.0.weight"].dtype
        )
    write_weights(out, source.config, tensors)


def write_original(source: Source, out: Path) -> None:
    tensors = {own_name(name): tensor for name, tensor in read_weights(source.draft).items()}
    num_heads, num_layers = numbers_of(source.config, tensors, source.draft)
    table = None if "tables.0.weight" in tensors else target_table(source)
    written: dict[str, torch.Tensor] = {}
    for head in range(num_heads):
        for layer in range(num_layers):
            weight = tensors[f"heads.{head}.{layer}.linear.weight"]
            # The layout's blocks always have a bias.
            bias = tensors.get(f"heads.{head}.{layer}.linear.bias", torch.zeros_like(weight[:, 0]))
            written |= {
                f"{head}.{layer}.linear.weight": weight,
                f"{head}.{layer}.linear.bias": bias,
            }
        own = (
            tensors[f"tables.{head}.weight"]
            if table is None
            else table.to(written[f"{head}.0.linear.weight"].dtype)
        )
        written[f"{head}.{num_layers}.weight"] = own.clone()
    save_file(written, out / MEDUSA[0], metadata={"format": "pt"})
    config = {
        "medusa_num_heads": num_heads,
        "medusa_num_layers": num_layers,
        "base_model_name_or_path": source.target_name,
    }
    write_config(out, config)


def target_table(source: Source) -> torch.Tensor:
    """[V, H], the target's output table: its own, or the embeddings it is tied to."""
    tied = bool(text_config(source.target_config).get("tie_word_embeddings"))
    name = TABLES[1] if tied else TABLES[0]
    for file in weight_files(source.target):
        with safe_open(file, framework="pt") as weights:
            if name in weights.keys():  # noqa: SIM118 - not a dict
                return weights.get_tensor(name)
    raise UserError(
        f"{source.target_name!r} has no weight {name!r} for the heads to multiply; this "
        "target cannot be exported"
    )
