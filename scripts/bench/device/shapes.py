"""Targets and drafts of random weights: their speed says something, their acceptance nothing."""

from __future__ import annotations

import argparse
from typing import Any

import torch
from transformers import LlamaConfig

from draftsmith.drafters.options import DflashOptions, Eagle3Options
from draftsmith.drafters.registry import FAMILIES
from draftsmith.drafters.target.attention import register
from draftsmith.drafters.target.load import build_model
from draftsmith.drafters.target.target import Target

SHARED = {"max_position_embeddings": 8192, "tie_word_embeddings": False, "rope_theta": 500000.0}
# Shapes of Llama 3.2 1B and of Llama 3.1 8B.
TARGETS: dict[str, dict[str, Any]] = {
    "tiny": {
        "vocab_size": 288, "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 4,
        "num_attention_heads": 4, "num_key_value_heads": 2,
    },
    "1b": {
        "vocab_size": 128256, "hidden_size": 2048, "intermediate_size": 8192,
        "num_hidden_layers": 16, "num_attention_heads": 32, "num_key_value_heads": 8,
        "head_dim": 64,
    },
    "8b": {
        "vocab_size": 128256, "hidden_size": 4096, "intermediate_size": 14336,
        "num_hidden_layers": 32, "num_attention_heads": 32, "num_key_value_heads": 8,
    },
}  # fmt: skip


def stage_parser(prog: str, description: str | None) -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog=prog, description=description)
    parser.add_argument("--out", required=True, help="JSON file to write")
    parser.add_argument("--size", choices=TARGETS, default="1b")
    parser.add_argument("--dry-run", action="store_true")
    return parser


def device_of(options: argparse.Namespace, index: int = 0) -> torch.device:
    return torch.device("cpu") if options.dry_run else torch.device("cuda", index)


def random_target(size: str, device: torch.device) -> Target:
    """Made on its device: a CPU takes minutes for the weights of a large one."""
    config = LlamaConfig(**SHARED, **TARGETS[size])
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
    torch.manual_seed(0)
    with device:
        model = build_model(
            config, trust_remote_code=False, attn_implementation=register(), dtype=dtype
        )
    return Target(model.eval(), size)


def random_draft(
    target: Target, dtype: torch.dtype | None = None, family: str = "eagle3"
) -> torch.nn.Module:
    options = {"eagle3": Eagle3Options(), "dflash": DflashOptions(mask_token=0)}[family]
    drafter = FAMILIES[family].create(options, target, seed=0)
    return drafter.to(device=target.device, dtype=dtype or target.dtype)
