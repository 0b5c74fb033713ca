"""DFlash and DSpark as llama.cpp reads them: one architecture, where a table of transitions makes
the difference."""

from __future__ import annotations

from pathlib import Path

from draftsmith.drafters.blocks.shape import BlockShape
from draftsmith.errors import UserError
from draftsmith.train.export.layouts.portable import check_block
from draftsmith.train.export.layouts.source import ExportSource
from draftsmith.train.export.llamacpp.file import DRAFT, Gguf, write_gguf
from draftsmith.train.export.llamacpp.lm import write_target
from draftsmith.train.export.llamacpp.shape import named, rope_factors, shape_values
from draftsmith.train.export.llamacpp.vocabulary import vocabulary

OUTSIDE = {
    "fc": "fc",
    "hidden_norm": "enc.output_norm",
    "markov_head.markov_w1": "markov_w1",
    "markov_head.markov_w2": "markov_w2",
    "confidence_head.proj": "conf_proj",
}


def write_block(source: ExportSource, out: Path) -> None:
    check_block(source)
    shape, config = source.drafter.shape, source.drafter.config
    check_represented(shape)
    values = shape_values(config) | {
        # Layers are counted by their inputs.
        "target_layers": list(source.drafter.taps),
        "block_size": shape.block_size,
        "attention.causal": shape.causal,
        "tokenizer.ggml.mask_token_id": shape.mask_token,
    }
    if shape.markov_rank:
        values |= {"sample_from_anchor": True, "has_confidence_head": bool(shape.confidence)}
    tensors = named(source.drafter.state_dict(), OUTSIDE) | rope_factors(config)
    words = vocabulary(source.target, config.vocab_size, trust_remote_code=source.trust_remote_code)
    write_gguf(out / DRAFT, Gguf("dflash", values | words, tensors), name=source.draft.name)
    write_target(source, out)


def check_represented(shape: BlockShape) -> None:
    if any(shape.windows):
        raise UserError(
            "the draft has layers with a window, which draftsmith does not write to GGUF; "
            "convert it with llama.cpp's own convert_hf_to_gguf.py"
        )
    if shape.confidence == "state":
        raise UserError(
            "the draft's confidence head reads no transition (confidence_head_with_markov is "
            "false), and llama.cpp's does; export it --to vllm"
        )
