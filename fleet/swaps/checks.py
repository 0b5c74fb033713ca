"""Files of a version, compared with those of the served draft before anything is loaded.

vLLM's own reload raises in its middle on a tensor of another shape and leaves tensors without
memory behind, and the next step then ends the engine.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import torch
from safetensors import SafetensorError, safe_open

# Keys of config.json that change from export to export and say nothing about the draft.
FREE_KEYS = frozenset({"_name_or_path", "transformers_version", "speculators_version"})


class DraftRefused(Exception):
    """A version that is not served, in one sentence with the reason."""


class TensorInfo(NamedTuple):
    dtype: str
    shape: tuple[int, ...]

    def __str__(self) -> str:
        return f"{self.dtype}{list(self.shape)}"


def tensor_files(folder: Path) -> list[Path]:
    """Tensor files of a folder; those that its index names must all be there."""
    files = sorted(folder.glob("*.safetensors"))
    for index in folder.glob("*.safetensors.index.json"):
        named = set(read_json(index).get("weight_map", {}).values())
        missing = sorted(named - {path.name for path in files})
        if missing:
            raise DraftRefused(f"{str(folder)!r} lacks {missing[0]!r}, which {index.name} names")
    if not files:
        raise DraftRefused(f"{str(folder)!r} has no safetensors file; it is no exported draft")
    return files


def read_json(path: Path) -> dict[str, Any]:
    try:
        values = json.loads(path.read_bytes())
    except (OSError, ValueError) as error:
        raise DraftRefused(f"{str(path)!r} cannot be read ({error})") from error
    if not isinstance(values, dict):
        raise DraftRefused(f"{str(path)!r} is no JSON object")
    return values


def opened(path: Path) -> Any:
    try:
        return safe_open(path, framework="pt")
    except (OSError, SafetensorError) as error:
        raise DraftRefused(f"{str(path)!r} is torn or no safetensors file ({error})") from error


def headers(folder: Path) -> dict[str, TensorInfo]:
    """Name, dtype and shape of every tensor, from the files' headers alone."""
    found: dict[str, TensorInfo] = {}
    for path in tensor_files(folder):
        with opened(path) as file:
            for name in file.keys():  # noqa: SIM118
                tensor = file.get_slice(name)
                found[name] = TensorInfo(tensor.get_dtype(), tuple(tensor.get_shape()))
    if not found:
        raise DraftRefused(f"{str(folder)!r} has no tensors; it is no exported draft")
    return found


def check_like(folder: Path, served: Path, *, is_part: bool = False) -> dict[str, TensorInfo]:
    """Tensors of a version that has the names, dtypes, shapes and config.json of the served draft.

    Args:
        is_part: the served folder holds the target too, and the version may lack the target's
            tensors.
    """
    new, old = headers(folder), headers(served)
    missing = [] if is_part else sorted(old.keys() - new.keys())
    unknown = sorted(new.keys() - old.keys())
    if missing or unknown:
        problem = f"lacks {missing[0]!r}" if missing else f"has {unknown[0]!r}"
        raise DraftRefused(f"{str(folder)!r} {problem}, unlike the served draft")
    for name, info in new.items():
        if info != old[name]:
            raise DraftRefused(
                f"{name!r} of {str(folder)!r} is {info}, of the served draft {old[name]}"
            )
    check_config(read_json(folder / "config.json"), read_json(served / "config.json"), folder)
    return new


def check_config(new: Mapping[str, Any], old: Mapping[str, Any], folder: Path) -> None:
    """Equal keys, since the module was built from the served draft's and stays."""
    for key in sorted((new.keys() | old.keys()) - FREE_KEYS):
        if new.get(key) != old.get(key):
            raise DraftRefused(
                f"config.json of {str(folder)!r} has {key}={new.get(key)!r}, of the served draft "
                f"{old.get(key)!r}; start the engine with this draft instead"
            )


def tensors_of(folder: Path) -> Iterator[tuple[str, torch.Tensor]]:
    """Tensors in host memory, one at a time, each finite."""
    for path in tensor_files(folder):
        with opened(path) as file:
            for name in file.keys():  # noqa: SIM118
                try:
                    tensor = file.get_tensor(name)
                except (OSError, SafetensorError) as error:
                    raise DraftRefused(f"{name!r} of {str(path)!r} is torn ({error})") from error
                check_finite(name, tensor, folder)
                yield name, tensor


def check_finite(name: str, tensor: torch.Tensor, folder: Path) -> None:
    if not tensor.is_floating_point():
        return
    # Floats of eight bits have no test of their own.
    wide = tensor.float() if tensor.element_size() == 1 else tensor
    if not bool(torch.isfinite(wide).all()):
        raise DraftRefused(f"{name!r} of {str(folder)!r} has values that are not finite")
