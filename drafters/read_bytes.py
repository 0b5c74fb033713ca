"""How many bytes of weights drafting reads: what its time is where memory bandwidth is the limit."""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple, Protocol, runtime_checkable

import torch
from torch import nn


class ReadBytes(NamedTuple):
    """What must be read, whatever an implementation reads again: a pass over several tokens reads a weight once."""

    proposal: int  # by a proposal of any length
    token: int  # besides, by each token of it


@runtime_checkable
class TellsReads(Protocol):
    """A drafter whose proposals all read alike."""

    def read_bytes(self) -> ReadBytes: ...


def weight_bytes(modules: Iterable[nn.Module], *tables: torch.Tensor) -> int:
    """Every weight but input embeddings, of which a pass reads a few rows; `tables` are read whole, be they such or borrowed."""
    parts = [part for module in modules for part in module.modules()]
    embeddings = {id(part.weight) for part in parts if isinstance(part, nn.Embedding)}
    weights = {id(weight): weight for part in parts for weight in part.parameters(recurse=False) if id(weight) not in embeddings}
    weights |= {id(table): table for table in tables}
    return sum(weight.numel() * weight.element_size() for weight in weights.values())
