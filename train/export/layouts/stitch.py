"""A module written among its target's weights: the folder is the target, with one file more."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Mapping
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file

from draftsmith.files import write_json
from draftsmith.train.export.layouts.source import file_shapes, weight_files

MODULE_FILE = "model-mtp.safetensors"


def stitch(target: Path, out: Path, module: Mapping[str, torch.Tensor], *, replaces: Callable[[str], bool]) -> None:
    """The target's files but for the tensors that the module `replaces`, the module's, and an index of all."""
    weight_map = copy_target_weights(target, out, replaces)
    own = {name: tensor.contiguous() for name, tensor in module.items()}
    save_file(own, out / MODULE_FILE, metadata={"format": "pt"})
    weight_map |= dict.fromkeys(own, MODULE_FILE)
    num_bytes = sum((out / file).stat().st_size for file in set(weight_map.values()))
    write_json(out / "model.safetensors.index.json", {"metadata": {"total_size": num_bytes}, "weight_map": weight_map})


def copy_target_weights(target: Path, out: Path, replaces: Callable[[str], bool]) -> dict[str, str]:
    """Returns tensor name -> file name in `out`."""
    weight_map = {}
    for file in weight_files(target):
        # Loaders take a `model.safetensors` for the whole model and never look at the index.
        name = file.name if file.name not in ("model.safetensors", MODULE_FILE) else f"{file.stem}-target.safetensors"
        names = list(file_shapes(file))
        kept = [tensor for tensor in names if not replaces(tensor)]
        if len(kept) == len(names):
            shutil.copyfile(file, out / name)
        elif kept:
            tensors = load_file(file)
            save_file({tensor: tensors[tensor] for tensor in kept}, out / name, metadata={"format": "pt"})
        weight_map |= dict.fromkeys(kept, name)
    return weight_map
