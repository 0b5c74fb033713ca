"""A folder with a draft before its family is known."""

from __future__ import annotations

from collections.abc import Mapping
from functools import cached_property
from pathlib import Path
from typing import Any

from draftsmith.drafters.weights import architecture_of, read_config, tensor_names


class DraftFolder:
    """`config` is that of the folder's `config.json`; tensors are named, not read."""

    def __init__(self, path: str | Path, config: Mapping[str, Any] | None = None):
        self.path = Path(path)
        self.config = read_config(self.path) if config is None else config

    @property
    def architecture(self) -> str:
        return architecture_of(self.config)

    @property
    def speculators_type(self) -> str | None:
        """The family under which the `speculators` library saved the draft; None in other
        layouts."""
        return self.config.get("speculators_model_type")

    @property
    def kind(self) -> str | None:
        """Name that trainers give beside an architecture that several kinds of drafts share."""
        own = (self.config.get("dflash_config") or {}).get("projector_type")
        return self.config.get("model_arch") or own

    @cached_property
    def names(self) -> frozenset[str]:
        """Tensors of the folder. Raises `UserError` for files that are missing or damaged."""
        return frozenset(tensor_names(self.path))
