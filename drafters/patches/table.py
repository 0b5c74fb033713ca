"""Class name -> patch, and the application of all of them to a model."""

from __future__ import annotations

from collections.abc import Callable
from types import MethodType
from typing import Any

import torch
from transformers import PreTrainedConfig

from draftsmith.drafters.patches.alibi import bloom, bloom_bias, mpt
from draftsmith.drafters.patches.attention import bert, falcon, numbered, scores
from draftsmith.drafters.patches.positions import counted, tempered

# The method that is patched, and what stands in its place.
PATCHES: dict[str, tuple[str, Callable[..., Any]]] = {
    "GPTJAttention": ("_attn", scores),
    "CodeGenAttention": ("_attn", scores),
    "GPTNeoXJapaneseAttention": ("_attn", scores),
    "GPTNeoSelfAttention": ("_attn", scores),
    "RemBertSelfAttention": ("forward", bert),
    "MegatronBertSelfAttention": ("forward", bert),
    "FalconAttention": ("forward", falcon),
    "BloomAttention": ("forward", bloom),
    "BloomModel": ("build_alibi_tensor", bloom_bias),
    "MptAttention": ("forward", mpt),
    "Zamba2Attention": ("forward", numbered),
    "Llama4TextAttention": ("forward", tempered),
    "BartLearnedPositionalEmbedding": ("forward", counted),
    "MBartLearnedPositionalEmbedding": ("forward", counted),
    "PLBartLearnedPositionalEmbedding": ("forward", counted),
    "BigBirdPegasusLearnedPositionalEmbedding": ("forward", counted),
    "BlenderbotLearnedPositionalEmbedding": ("forward", counted),
    "BlenderbotSmallLearnedPositionalEmbedding": ("forward", counted),
    "PegasusSinusoidalPositionalEmbedding": ("forward", counted),
    "MarianSinusoidalPositionalEmbedding": ("forward", counted),
}
# Kinds whose own attention needs masks that add up: it is the one that they have no name for, or
# misread without a word.
OWN_ATTENTION = frozenset(
    {
        "falcon",
        "gptj",
        "gpt_neo",
        "codegen",
        "gpt_neox_japanese",
        "bloom",
        "mpt",
        "rembert",
        "megatron-bert",
    }
)


def implementation(config: PreTrainedConfig, ours: str) -> str:
    """The name of the attention that a model is made with: `ours`, or its own."""
    return "eager" if config.model_type in OWN_ATTENTION else ours


def patch(model: torch.nn.Module) -> None:
    """Patches every module of a class in the table."""
    for module in model.modules():
        if (found := PATCHES.get(type(module).__name__)) is not None:
            name, method = found
            # Bound, so that a copy of the module runs on its own weights.
            setattr(module, name, MethodType(method, module))
