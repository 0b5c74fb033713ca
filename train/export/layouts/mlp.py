"""The MLP speculator as IBM's checkpoints have it, which fms and TGI read."""

from __future__ import annotations

from pathlib import Path

import torch

from draftsmith.drafters.weights import read_weights, write_weights
from draftsmith.errors import UserError
from draftsmith.train.export.layouts.source import Source, text_config


def write_ibm(source: Source, out: Path) -> None:
    target = text_config(source.target_config)
    for key, own in (("vocab_size", "vocab_size"), ("hidden_size", "emb_dim")):
        if source.config.get(own) != target[key]:
            raise UserError(
                f"the draft was made for a target with {key} {source.config.get(own)}, {source.target_name!r} has {target[key]}"
            )
    tensors = read_weights(source.draft)
    write_weights(out, source.config, spread(tensors, source.config["n_predict"]) if source.config["tie_weights"] else tensors)


def spread(tensors: dict[str, torch.Tensor], num_predict: int) -> dict[str, torch.Tensor]:
    """Tied weights repeated at every depth: readers build all of them, and leave what they do not find at random values."""
    depths = {name.split(".")[1]: int(name.split(".")[2]) for name in sorted(tensors)}  # the last one that each module has
    copies = {}
    for name, tensor in tensors.items():
        prefix, module, depth, *rest = name.split(".")
        last = num_predict if int(depth) == depths[module] else int(depth) + 1
        copies |= {".".join([prefix, module, str(at), *rest]): tensor for at in range(int(depth), last)}
    return copies
