"""Weights and config of a folder, with one sentence for every way they can be wrong."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from pathlib import Path
from pickle import UnpicklingError
from typing import Any, NamedTuple, Protocol, runtime_checkable

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import nn

from draftsmith import files
from draftsmith.errors import UserError

CONFIG = "config.json"
WEIGHTS = "model.safetensors"
INDEX = "model.safetensors.index.json"
PICKLED = "pytorch_model.bin"  # how the first EAGLE drafts were published; nothing here writes it


def read_config(folder: Path) -> dict[str, Any]:
    config = files.read_json(folder / CONFIG, "draft config")
    if not isinstance(config, dict):
        raise UserError(
            f"draft config {str(folder / CONFIG)!r} holds no mapping; restore or train the draft "
            "again"
        )
    return config


def architecture_of(config: Mapping[str, Any]) -> str:
    return (config.get("architectures") or ["unknown"])[0]


def read_weights(folder: Path) -> dict[str, torch.Tensor]:
    """Every tensor of the folder, on the CPU. Missing, damaged and non-finite weights raise a
    `UserError`."""
    tensors: dict[str, torch.Tensor] = {}
    for path in weight_files(folder):
        try:
            tensors |= _load_pickled(path) if path.name == PICKLED else load_file(path)
        except FileNotFoundError as error:
            raise UserError(
                f"draft weights {str(path)!r} do not exist; check the path or train the draft again"
            ) from error
        except (SafetensorError, OSError) as error:
            raise UserError(
                f"draft weights {str(path)!r} are damaged ({error}); restore the file"
            ) from error
    check_finite(tensors, str(folder))
    return tensors


def _load_pickled(path: Path) -> dict[str, torch.Tensor]:
    """Tensors alone: an unpickler that builds nothing else, so that a file can run no code."""
    try:
        return torch.load(path, map_location="cpu", weights_only=True)
    except (UnpicklingError, RuntimeError, EOFError) as error:
        reason = str(error).strip().splitlines()[0].rstrip(".")
        raise UserError(
            f"draft weights {str(path)!r} hold more than tensors or are damaged ({reason}); use "
            "safetensors"
        ) from error


def weight_files(folder: Path) -> list[Path]:
    """Names of the weight files of a folder; reading them finds out whether they exist."""
    if not (folder / INDEX).is_file():
        plain = folder / WEIGHTS
        return (
            [folder / PICKLED] if not plain.is_file() and (folder / PICKLED).is_file() else [plain]
        )
    index = files.read_json(folder / INDEX, "weight index")
    return [folder / name for name in sorted(set(index["weight_map"].values()))]


def check_finite(tensors: Mapping[str, torch.Tensor], where: str) -> None:
    for name, tensor in tensors.items():
        if tensor.is_floating_point() and not torch.isfinite(tensor).all():
            raise UserError(
                f"weight {name!r} of {where!r} holds NaN or infinite values; use an earlier "
                "version of the draft"
            )


def load_into(module: torch.nn.Module, tensors: Mapping[str, torch.Tensor], where: str) -> None:
    """Copies `tensors` into the module's own state; names and shapes must agree exactly."""
    state = module.state_dict()
    for name, own in state.items():
        if name not in tensors:
            raise UserError(
                f"weight {name!r} is missing in {where!r}; restore or train the draft again"
            )
        if tensors[name].shape != own.shape:
            raise UserError(
                f"weight {name!r} of {where!r} has shape {list(tensors[name].shape)} where its "
                f"config says {list(own.shape)}; "
                "restore the folder"
            )
    if unknown := sorted(tensors.keys() - state.keys()):
        raise UserError(
            f"weight {unknown[0]!r} of {where!r} has no place in this family; check that the "
            "draft is of it"
        )
    module.load_state_dict(tensors)


def write_weights(
    folder: Path, config: Mapping[str, Any], tensors: Mapping[str, torch.Tensor]
) -> None:
    """Each file whole; tensors that share memory are written apart."""
    detached = {
        name: tensor.detach().cpu().contiguous().clone() for name, tensor in tensors.items()
    }
    check_finite(detached, "the draft to be saved")
    folder.mkdir(parents=True, exist_ok=True)
    with files.atomic_path(folder / WEIGHTS) as temporary:
        save_file(detached, temporary, metadata={"format": "pt"})
    files.write_json(folder / CONFIG, dict(config))


class ReadBytes(NamedTuple):
    """Bytes that drafting must read, whatever an implementation reads again: a pass over several
    tokens reads a weight once."""

    proposal: int  # by a proposal of any length
    token: int  # besides, by each token of it


@runtime_checkable
class TellsReads(Protocol):
    """A drafter whose proposals all read alike."""

    def read_bytes(self) -> ReadBytes: ...


def weight_bytes(modules: Iterable[nn.Module], *tables: torch.Tensor) -> int:
    """Every weight but input embeddings, of which a pass reads a few rows; `tables` are read whole,
    be they such or borrowed."""
    parts = [part for module in modules for part in module.modules()]
    embeddings = {id(part.weight) for part in parts if isinstance(part, nn.Embedding)}
    weights = {
        id(weight): weight
        for part in parts
        for weight in part.parameters(recurse=False)
        if id(weight) not in embeddings
    }
    weights |= {id(table): table for table in tables}
    return sum(weight.numel() * weight.element_size() for weight in weights.values())
