"""Targets and drafts of random weights: their speed says something, their acceptance nothing."""

from __future__ import annotations

from typing import Any

import torch
from transformers import LlamaConfig

from draftsmith.drafters.options import Eagle3Options
from draftsmith.drafters.registry import FAMILIES
from draftsmith.drafters.target.attention import register
from draftsmith.drafters.target.load import build_model
from draftsmith.drafters.target.target import Target

SHARED = {"max_position_embeddings": 8192, "rope_theta": 500000.0}
# Shapes of Llama 3.2 1B, as it is published and with a head of its own, and of Llama 3.1 8B.
TARGETS: dict[str, dict[str, Any]] = {
    "tiny": {
        "vocab_size": 288, "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 4,
        "num_attention_heads": 4, "num_key_value_heads": 2, "tie_word_embeddings": False,
    },
    "1b": {
        "vocab_size": 128256, "hidden_size": 2048, "intermediate_size": 8192,
        "num_hidden_layers": 16, "num_attention_heads": 32, "num_key_value_heads": 8,
        "head_dim": 64, "tie_word_embeddings": True,
    },
    "8b": {
        "vocab_size": 128256, "hidden_size": 4096, "intermediate_size": 14336,
        "num_hidden_layers": 32, "num_attention_heads": 32, "num_key_value_heads": 8,
        "tie_word_embeddings": False,
    },
}  # fmt: skip
# What people train for a vocabulary of 128 thousand.
DRAFT_VOCABULARIES = {"tiny": 64, "1b": 32000, "8b": 32000}


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


def random_draft(target: Target) -> torch.nn.Module:
    options = Eagle3Options(draft_vocab_size=DRAFT_VOCABULARIES[target.name])
    counts = torch.ones(target.vocab_size, dtype=torch.int64)
    drafter = FAMILIES["eagle3"].create(options, target, seed=0, token_counts=counts)
    return drafter.to(device=target.device, dtype=target.dtype)
