"""Revision of the weights in a folder, by the first values of each parameter in its files."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from transformers import PreTrainedModel

from draftsmith.drafters.target.target import FIRST, Parameter
from draftsmith.drafters.weights import weight_files


def parameters_in(folder: Path, model: PreTrainedModel) -> list[Parameter] | None:
    """The model's parameters, in its order, with the first values of each, from safetensors. None
    where the files hold others: a model whose weights are converted while they are loaded."""
    found: dict[str, Parameter] = {}
    wanted = {name: parameter.shape for name, parameter in model.named_parameters()}
    buffers = {name for name, _ in model.named_buffers()}
    for path in weight_files(folder):
        if path.suffix != ".safetensors" or not path.is_file():
            return None
        with safe_open(path, framework="pt") as file:
            for name in file.keys():  # noqa: SIM118 - not a dict
                values = file.get_slice(name)
                if tuple(values.get_shape()) == wanted.get(name):
                    found[name] = Parameter(name, wanted[name], first_rows(values, wanted[name]))
                elif name not in buffers:
                    return None
    return [found[name] for name in wanted] if found.keys() == wanted.keys() else None


def first_rows(values: Any, shape: torch.Size) -> torch.Tensor:
    """The first `FIRST` values of a tensor in a file, and at most the rest of a row with them."""
    if not shape:
        return values[...].flatten()
    return values[: math.ceil(FIRST / max(1, math.prod(shape[1:])))].flatten()[:FIRST]
