"""Class name -> patch, and the application of all of them to a model."""

from __future__ import annotations

from collections.abc import Callable

import torch
from transformers import PreTrainedConfig

from draftsmith.drafters.patches.alibi import bloom, bloom_body, mpt
from draftsmith.drafters.patches.attention import bert, falcon, scores_method
from draftsmith.drafters.patches.positions import counted

PATCHES: dict[str, Callable[[torch.nn.Module], None]] = {
    "GPTJAttention": scores_method,
    "CodeGenAttention": scores_method,
    "GPTNeoXJapaneseAttention": scores_method,
    "GPTNeoSelfAttention": scores_method,
    "RemBertSelfAttention": bert,
    "MegatronBertSelfAttention": bert,
    "FalconAttention": falcon,
    "BloomAttention": bloom,
    "BloomModel": bloom_body,
    "MptAttention": mpt,
    "BartLearnedPositionalEmbedding": counted,
    "MBartLearnedPositionalEmbedding": counted,
    "PLBartLearnedPositionalEmbedding": counted,
    "BigBirdPegasusLearnedPositionalEmbedding": counted,
    "BlenderbotLearnedPositionalEmbedding": counted,
    "BlenderbotSmallLearnedPositionalEmbedding": counted,
    "PegasusSinusoidalPositionalEmbedding": counted,
    "MarianSinusoidalPositionalEmbedding": counted,
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
    """Patches every module of a class in the table, once."""
    for module in model.modules():
        apply = PATCHES.get(type(module).__name__)
        if apply is not None and not getattr(module, "_is_patched", False):
            apply(module)
            module._is_patched = True
