"""Files of a version, compared with those of the served draft before anything is loaded.

vLLM's own reload raises in its middle on a tensor of another shape and leaves tensors without
memory behind, and the next step then ends the engine.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from draftsmith.drafters.weights import TensorInfo, read_config, stored_tensors, weight_files
from draftsmith.errors import UserError

# Keys of config.json that change from export to export and say nothing about the draft.
FREE_KEYS = frozenset({"_name_or_path", "transformers_version", "speculators_version"})


class DraftRefused(UserError):
    """A version that is not served, in one sentence with the reason."""


def headers(folder: Path) -> dict[str, TensorInfo]:
    """Name, dtype and shape of every tensor, from the files' headers alone."""
    found: dict[str, TensorInfo] = {}
    for path in weight_files(folder):
        found |= stored_tensors(path)
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
    check_config(read_config(folder), read_config(served), folder)
    return new


def check_config(new: Mapping[str, Any], old: Mapping[str, Any], folder: Path) -> None:
    """Equal keys, since the module was built from the served draft's and stays."""
    for key in sorted((new.keys() | old.keys()) - FREE_KEYS):
        if new.get(key) != old.get(key):
            raise DraftRefused(
                f"config.json of {str(folder)!r} has {key}={new.get(key)!r}, of the served draft "
                f"{old.get(key)!r}; start the engine with this draft instead"
            )
