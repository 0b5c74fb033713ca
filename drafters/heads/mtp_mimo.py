"""An MTP module that a target brought along, read from the target's own folder: MiMo's layout,
which engines read for dense models and `export` writes (`train/export/mtp.py`).
transformers leaves the module out when it loads the target.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open

from draftsmith.drafters.heads.mtp_layouts import MIMO, own_names
from draftsmith.drafters.layouts.fp8 import block_of, dequantised
from draftsmith.drafters.weights import check_finite, weight_files
from draftsmith.errors import UserError

ARCHITECTURE = "MiMoForCausalLM"


def is_native(config: Mapping[str, Any]) -> bool:
    return ARCHITECTURE in (config.get("architectures") or ())


def read_native(folder: Path, config: Mapping[str, Any]) -> dict[str, torch.Tensor]:
    """The module's tensors under our names; nothing else of the folder, which holds the whole
    target, is read.

    Biases of q, k and v that are all zero are left out: Qwen2 blocks have them, modules trained
    here need not.
    """
    published = module_tensors(folder, config, MIMO.prefix, needed=MIMO.needed)
    tensors = own_names(published, MIMO)
    tensors["eh_proj.weight"] = swapped(tensors["eh_proj.weight"])
    biases = {name for name in tensors if name.endswith("_proj.bias")}
    if not any(bool(tensors[name].any()) for name in biases):
        tensors = {name: tensor for name, tensor in tensors.items() if name not in biases}
    return tensors


def swapped(projection: torch.Tensor) -> torch.Tensor:
    """The weight [H, 2 H] for its two inputs in the other order."""
    return torch.cat(projection.chunk(2, dim=1)[::-1], dim=1)


def module_tensors(
    folder: Path, config: Mapping[str, Any], prefix: str, *, needed: str
) -> dict[str, torch.Tensor]:
    """Those of the module under `prefix`, which their names here lack; FP8 as numbers."""
    tensors: dict[str, torch.Tensor] = {}
    for path in weight_files(folder):
        with safe_open(path, framework="pt") as file:
            names = [name for name in file.keys() if name.startswith(prefix)]  # noqa: SIM118 - not a dict
            tensors |= {name.removeprefix(prefix): file.get_tensor(name) for name in names}
    if needed not in tensors:
        raise UserError(
            f"{str(folder)!r} holds no {prefix}{needed}; give a target with an MTP module"
        )
    tensors = dequantised(tensors, str(folder), block_of(config))
    for name, tensor in tensors.items():
        if not tensor.is_floating_point() or tensor.element_size() == 1:
            raise UserError(
                f"weight {prefix + name!r} of {str(folder)!r} is stored as "
                f"{str(tensor.dtype).removeprefix('torch.')}; "
                "give a folder whose MTP module is not quantised, or in FP8 with its scales"
            )
    check_finite(tensors, str(folder))
    return tensors
