"""Medusa as vLLM up to 0.32 reads it, with one table for all heads, and in the original layout of
FasterDecoding, TGI and TensorRT-LLM, with a table for each. Both need the target's table written
out, because neither looks for it in the target.
"""

from __future__ import annotations

from pathlib import Path

import torch
from safetensors.torch import save_file

from draftsmith.drafters.states.medusa import engine_name
from draftsmith.drafters.weights import MEDUSA, write_weights
from draftsmith.train.export.layouts.source import (
    ExportSource,
    target_tensor,
    text_config,
    write_config,
)

TABLES = ("lm_head.weight", "model.embed_tokens.weight")


def write_vllm(source: ExportSource, out: Path) -> None:
    """A block without its table would be served with random numbers in its place."""
    state = source.drafter.state_dict()
    tensors = {engine_name(name): tensor for name, tensor in state.items()}
    if not source.drafter.has_own_heads:
        dtype = tensors["blocks.0.layers.0.weight"].dtype
        tensors["lm_head.weight"] = target_table(source).to(dtype)
    write_weights(out, source.drafter.portable_config(), tensors)


def write_original(source: ExportSource, out: Path) -> None:
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
