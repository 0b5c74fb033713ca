"""A GGUF file written by the `gguf` package: metadata by key, tensors by name."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from types import ModuleType
from typing import Any, NamedTuple

import torch

from draftsmith.errors import UserError
from draftsmith.extras import missing

DRAFT, TARGET = "draft.gguf", "target.gguf"
TOKENIZER = "tokenizer."
# Kinds of a whole file, as llama.cpp counts them.
FILE_TYPES = {torch.float32: 0, torch.float16: 1, torch.bfloat16: 32}


class Gguf(NamedTuple):
    arch: str
    values: dict[str, Any]  # metadata; keys of the architecture without its prefix
    tensors: dict[str, torch.Tensor]


def library() -> ModuleType:
    try:
        import gguf
    except ImportError as error:
        raise missing("export --to gguf", "gguf", "gguf") from error
    return gguf


def write_gguf(path: Path, content: Gguf, *, name: str) -> None:
    """`name` is shown by engines. Vectors are stored as float32, which llama.cpp's norms and biases
    are; matrices keep their type."""
    gguf = library()
    writer = gguf.GGUFWriter(path, content.arch)
    writer.add_string("general.name", name)
    writer.add_uint32("general.file_type", file_type(content.tensors))
    for key, value in content.values.items():
        full = key if key.startswith(TOKENIZER) else f"{content.arch}.{key}"
        adder(writer, value)(full, value)
    for tensor_name, tensor in content.tensors.items():
        stored = tensor.float() if tensor.ndim == 1 and tensor.is_floating_point() else tensor
        stored = stored.contiguous().cpu()
        if stored.dtype == torch.bfloat16:
            raw = stored.view(torch.uint8).numpy()
            writer.add_tensor(tensor_name, raw, raw_dtype=gguf.GGMLQuantizationType.BF16)
        else:
            writer.add_tensor(tensor_name, stored.numpy())
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def file_type(tensors: Mapping[str, torch.Tensor]) -> int:
    """The type of the largest matrix."""
    largest = max(
        (tensor for tensor in tensors.values() if tensor.ndim > 1),
        key=lambda tensor: tensor.numel(),
    )
    if largest.dtype not in FILE_TYPES:
        raise UserError(
            f"weights of type {str(largest.dtype).removeprefix('torch.')} are not written to GGUF; "
            "save the model in float32, float16 or bfloat16"
        )
    return FILE_TYPES[largest.dtype]


def adder(writer: Any, value: Any) -> Callable[[str, Any], None]:
    adders = {
        bool: writer.add_bool,
        int: writer.add_uint32,
        float: writer.add_float32,
        str: writer.add_string,
        list: writer.add_array,
    }
    return adders[type(value)]
