"""A tiny LM whose tokenizer is another one than a target's."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

SPACE = "\u2581"


def write_foreign(folder: Path, theirs: Any) -> None:
    """Every second of the target's tokens, in the opposite order and with another way of writing a
    space, and 40 of its own."""
    names = [
        theirs.convert_ids_to_tokens(index).replace("\u0120", SPACE)
        for index in range(4, len(theirs), 2)
    ]
    names = ["<unk>", "</s>", *[f"own{number}" for number in range(40)], *names[::-1]]
    vocabulary = {name: index for index, name in enumerate(names)}
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Split("", "isolated")
    tokenizer.decoder = decoders.Fuse()
    PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, unk_token="<unk>", eos_token="</s>"
    ).save_pretrained(folder)
    config = LlamaConfig(
        vocab_size=len(vocabulary), hidden_size=24, intermediate_size=48, num_hidden_layers=2,
        num_attention_heads=2,
        max_position_embeddings=256,
    )  # fmt: skip
    torch.manual_seed(3)
    LlamaForCausalLM(config).save_pretrained(folder)
