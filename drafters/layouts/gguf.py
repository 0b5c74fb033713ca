"""A model in one GGUF file, as a folder that every command and engine reads.

transformers dequantises the file once into the user's cache. What its codes stand for, rounded to
bfloat16, is the model; files of unquantised weights keep their type.
"""

from __future__ import annotations

import functools
import hashlib
import importlib.util
import re
from pathlib import Path
from typing import Any

import torch
import transformers
from transformers import AutoModelForCausalLM, AutoTokenizer

from draftsmith.drafters.layouts import hub
from draftsmith.drafters.layouts.hub import CONFIG
from draftsmith.errors import UserError, first_line, missing
from draftsmith.files import atomic_folder, locked
from draftsmith.kernels.host_compiler import cache_folder
from draftsmith.progress import say

MAGIC = b"GGUF"
PART = re.compile(r"-\d{5}-of-\d{5}\.gguf")
# Name of a type in the file -> that of the folder's weights; of any other, bfloat16.
DTYPES = {"F32": torch.float32, "F16": torch.float16}


def model_folder(path: str | Path, *, weights: bool = True) -> str | Path:
    """`path`, or where that is GGUF, the folder that it is converted into; of `org/name@revision`
    the folder of its files in the user's cache; without `weights`, of the small ones alone.

    GGUF is a file, a folder that holds one and no config.json, `org/name:file.gguf` of the Hub, or
    `demo`. Raises `UserError` for a file that transformers cannot read, and as `ask_hub`."""
    file = hub.gguf_file(str(path))
    if file is None:
        name, revision = hub.split_revision(path)
        if revision is not None:
            without = hub.WEIGHT_FILES[4 if weights else 0 :]  # transformers reads four kinds
            return hub.snapshot(name, "model", revision=revision, without=without)
        hub.ask_hub(path)
        return path
    return _converted(file.resolve())


@functools.cache
def _converted(file: Path) -> Path:
    if PART.search(file.name):
        raise UserError(
            f"{str(file)!r} is a part of a model, which transformers does not read; join the parts "
            "with llama.cpp's llama-gguf-split --merge"
        )
    if importlib.util.find_spec("gguf") is None:
        raise missing("a GGUF target", "gguf", "gguf")
    with file.open("rb") as begin:
        if begin.read(len(MAGIC)) != MAGIC:
            raise UserError(
                f"{str(file)!r} does not begin as GGUF does; check the path, or fetch it anew"
            )
    state = file.stat()
    key = f"{file} {state.st_size} {state.st_mtime_ns} {transformers.__version__}"
    digest = hashlib.sha256(key.encode()).hexdigest()[:12]
    folder = cache_folder() / "gguf" / f"{file.stem}-{digest}"
    if not (folder / CONFIG).is_file():
        try:
            with locked(folder):
                if not (folder / CONFIG).is_file():  # nor has another process written it meanwhile
                    say(f"dequantising {file.name} once, into {folder}")
                    with atomic_folder(folder) as temporary:
                        _convert(file, temporary)
        except Exception as error:  # readers of architectures raise what they like
            raise UserError(
                f"GGUF file {str(file)!r} cannot be read by transformers ({first_line(error)}); "
                "give the model as published for transformers"
            ) from error
    return folder


def _convert(file: Path, folder: Path) -> None:
    options: dict[str, Any] = {"gguf_file": file.name}
    tokenizer = AutoTokenizer.from_pretrained(file.parent, trust_remote_code=False, **options)
    if (config := getattr(transformers, "GgufConfig", None)) is not None:
        options["quantization_config"] = config(dequantize=True)
    model = AutoModelForCausalLM.from_pretrained(
        file.parent, trust_remote_code=False, dtype=_dtype(file), **options
    )
    # Nothing is quantised any more, and `save_pretrained` refuses what says it is.
    if hasattr(model, "hf_quantizer"):
        model.hf_quantizer = None
    if hasattr(model.config, "quantization_config"):
        del model.config.quantization_config
    # It would write nothing on other ranks than the first, which may be of another machine.
    model.should_save_on_this_rank = lambda is_main_process: True
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)


def _dtype(file: Path) -> torch.dtype:
    from gguf import GGUFReader

    names = {one.tensor_type.name for one in GGUFReader(file).tensors if len(one.shape) > 1}
    return DTYPES.get(names.pop(), torch.bfloat16) if len(names) == 1 else torch.bfloat16
