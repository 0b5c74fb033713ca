"""Weights and config of a folder, with one sentence for every way they can be wrong."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from pickle import UnpicklingError
from typing import Any, NamedTuple, Protocol, TypeVar, runtime_checkable

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import load_file, save_file
from torch import nn

from draftsmith import files
from draftsmith.errors import UserError, first_line

Found = TypeVar("Found")

CONFIG = "config.json"
WEIGHTS = "model.safetensors"
INDEX = "model.safetensors.index.json"
# How the first EAGLE and Medusa drafts were published; nothing here writes them.
PICKLED = "pytorch_model.bin"
PICKLED_INDEX = "pytorch_model.bin.index.json"
MEDUSA = ("medusa_lm_head.safetensors", "medusa_lm_head.pt")
FORMS = (INDEX, WEIGHTS, PICKLED_INDEX, PICKLED, *MEDUSA)


def read_config(folder: Path) -> dict[str, Any]:
    return files.read_json(folder / CONFIG, "draft config")


def architecture_of(config: Mapping[str, Any]) -> str:
    named = config.get("architectures")
    return named[0] if isinstance(named, list) and named else "unknown"


def read_weights(folder: Path) -> dict[str, torch.Tensor]:
    """Every tensor of the folder, on the CPU. Missing, damaged and non-finite weights raise a
    `UserError`."""
    tensors: dict[str, torch.Tensor] = {}
    for path in weight_files(folder):
        tensors |= _read(path, _pickled_tensors, load_file)
    check_finite(tensors, str(folder))
    return tensors


def tensor_names(folder: Path) -> set[str]:
    """Names of every tensor of the folder; of safetensors no weight is read."""
    names: set[str] = set()
    if (folder / INDEX).is_file():
        weight_files(folder)  # for what it refuses
        return set(files.read_json(folder / INDEX, "weight index")["weight_map"])
    for path in weight_files(folder):
        names |= stored_tensors(path).keys()
    return names


class TensorInfo(NamedTuple):
    dtype: str
    shape: tuple[int, ...]

    def __str__(self) -> str:
        return f"{self.dtype}{list(self.shape)}"


def stored_tensors(path: Path) -> dict[str, TensorInfo]:
    """Tensors of a file by name; of safetensors its header alone is read."""
    return _read(path, _pickled_infos, _stored_infos)


def _stored_infos(path: Path) -> dict[str, TensorInfo]:
    with safe_open(path, framework="pt") as file:
        found = {name: file.get_slice(name) for name in file.keys()}  # noqa: SIM118 - not a dict
        return {
            name: TensorInfo(one.get_dtype(), tuple(one.get_shape())) for name, one in found.items()
        }


def _pickled_infos(path: Path) -> dict[str, TensorInfo]:
    found = _pickled_tensors(path)
    return {name: TensorInfo(str(one.dtype), tuple(one.shape)) for name, one in found.items()}


def _read(path: Path, pickled: Callable[[Path], Found], safe: Callable[[Path], Found]) -> Found:
    try:
        return safe(path) if path.suffix == ".safetensors" else pickled(path)
    except FileNotFoundError as error:
        raise UserError(
            f"weights {str(path)!r} do not exist; check the path, or fetch or save the model again"
        ) from error
    except (SafetensorError, OSError) as error:
        raise UserError(f"weights {str(path)!r} are damaged ({error}); restore the file") from error


def load_pickled(path: Path) -> Any:
    """Tensors and plain values alone: an unpickler that builds nothing else, so that a file can run
    no code."""
    try:
        return torch.load(path, map_location="cpu", weights_only=True)
    except (UnpicklingError, RuntimeError, EOFError, KeyError, ValueError) as error:
        raise UserError(
            f"draft weights {str(path)!r} hold more than tensors or are damaged "
            f"({first_line(error)}); use safetensors"
        ) from error


def _pickled_tensors(path: Path) -> dict[str, torch.Tensor]:
    found = load_pickled(path)
    if not isinstance(found, dict) or not all(
        isinstance(name, str) and isinstance(tensor, torch.Tensor) for name, tensor in found.items()
    ):
        raise UserError(
            f"draft weights {str(path)!r} are no mapping of names to tensors; use safetensors"
        )
    return found


def weight_files(folder: Path) -> list[Path]:
    """Paths of the weight files of a folder, of several forms safetensors; reading them finds out
    whether they exist. A whole model beside an index of safetensors may be half of an upload."""
    found = next((name for name in FORMS if (folder / name).is_file()), WEIGHTS)
    if found not in (INDEX, PICKLED_INDEX):
        return [folder / found]
    weight_map = files.read_json(folder / found, "weight index").get("weight_map")
    named = list(weight_map.values()) if isinstance(weight_map, dict) else []
    if not named or any(not isinstance(one, str) or one != Path(one).name for one in named):
        raise UserError(
            f"weight index {str(folder / found)!r} names no files of its folder; restore the file"
        )
    return [folder / name for name in sorted(set(named))]


def safe_files(folder: Path) -> list[Path]:
    """Weight files of which single tensors are read."""
    found = weight_files(folder)
    for path in found:
        if path.suffix != ".safetensors" or not path.is_file():
            raise UserError(
                f"{str(folder)!r} lacks {WEIGHTS if path.is_file() else path.name}; fetch or save "
                "the model again"
            )
    return found


def check_finite(tensors: Mapping[str, torch.Tensor], where: str) -> None:
    for name, tensor in tensors.items():
        if not tensor.is_floating_point():
            continue
        # Floats of eight bits have no test of their own.
        wide = tensor.float() if tensor.element_size() == 1 else tensor
        if not torch.isfinite(wide).all():
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
    detached = {key: tensor.detach().cpu().contiguous().clone() for key, tensor in tensors.items()}
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
