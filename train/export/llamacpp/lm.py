"""Causal LMs of Llama's and Qwen's kinds: a draft LM, and the target of any draft."""

from __future__ import annotations

from pathlib import Path
from typing import NamedTuple

from draftsmith.drafters.target.load import load_config
from draftsmith.drafters.weights import read_weights
from draftsmith.errors import UserError
from draftsmith.train.export.layouts import plain
from draftsmith.train.export.layouts.source import ExportSource
from draftsmith.train.export.llamacpp.file import DRAFT, TARGET, Gguf, write_gguf
from draftsmith.train.export.llamacpp.shape import (
    check_layers,
    interleaved,
    named,
    rope_factors,
    shape_values,
)
from draftsmith.train.export.llamacpp.vocabulary import vocabulary


class TensorKind(NamedTuple):
    arch: str
    interleaves: bool  # whether llama.cpp turns neighbouring values of a head


KINDS = {
    "llama": TensorKind("llama", True),
    "mistral": TensorKind("llama", True),
    "qwen2": TensorKind("qwen2", False),
    "qwen3": TensorKind("qwen3", False),
}


def write_lm(source: ExportSource, out: Path) -> None:
    plain.check(source)
    write_model(source.draft, source, out / DRAFT)
    write_target(source, out)


def write_target(source: ExportSource, out: Path) -> None:
    if source.with_target:
        write_model(source.target, source, out / TARGET)


def write_model(folder: Path, source: ExportSource, path: Path) -> None:
    """The causal LM in `folder`, with the target's vocabulary."""
    trust = source.trust_remote_code
    config = load_config(folder, trust_remote_code=trust)
    if config.model_type not in KINDS:
        raise UserError(
            f"{str(folder)!r} is of kind {config.model_type!r}, and draftsmith writes "
            f"{', '.join(KINDS)} to GGUF; convert it with llama.cpp's own convert_hf_to_gguf.py"
        )
    kind = KINDS[config.model_type]
    check_layers(config)
    tensors = named(
        {name.removeprefix("model."): tensor for name, tensor in read_weights(folder).items()}
    )
    if config.tie_word_embeddings:
        tensors.pop("output.weight", None)
    values = shape_values(config)
    if kind.interleaves:
        tensors = interleaved(tensors, values)
    words = vocabulary(source.target, config.vocab_size, trust_remote_code=trust)
    content = Gguf(kind.arch, values | words, tensors | rope_factors(config))
    write_gguf(path, content, name=folder.name)
