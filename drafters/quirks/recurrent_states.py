"""States of layers that are no attention: recurrent, linear-attention and convolution layers. Each
condenses a text into a state of fixed size, and reads a pass text by text, each from its own.

Legend: B rows, T columns.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple, Protocol

import torch

from draftsmith.drafters.quirks.kept_state import KeptState


class TextPiece(NamedTuple):
    """Consecutive tokens of one text in a pass [B, T]."""

    row: int
    begin: int  # first column
    end: int
    source: int | None  # slot of the state before them; None: they begin their text
    target: int | None  # slot that the state after them is written to; None: it is dropped


# Pieces that do not depend on each other; a wave may read what the waves before it wrote.
Wave = Sequence[TextPiece]


class RowRead(NamedTuple):
    """One text's share of a round: known tokens, then drafted ones."""

    owner: int  # number of its slots
    kept: KeptState
    is_start: bool  # its known tokens begin the text
    num_known: int  # 1 or more
    num_kept: int  # of these, the first ones, which the kept state reads
    num_drafted: int

    def verified(self, accepted: int) -> None:
        """Moves the text's state on."""
        self.kept.verified(self.num_known - self.num_kept, self.num_drafted, accepted)


def round_waves(reads: Sequence[RowRead]) -> tuple[list[TextPiece], list[TextPiece]]:
    """Pieces of a round in a pass [1, T], text after text: tokens that the kept state reads, and
    the others from there."""
    known, others = [], []
    begin = 0
    for read in reads:
        middle, end = begin + read.num_kept, begin + read.num_known + read.num_drafted
        slot = read.kept.slot(read.owner)
        source = None if read.is_start else slot
        if middle > begin:
            known.append(TextPiece(0, begin, middle, source, slot))
            source = slot
        if end > middle:
            # The state after them is of use where it may become the kept one.
            whole = read.num_kept == read.num_known
            ahead = read.kept.slot_ahead(read.owner) if whole else None
            others.append(TextPiece(0, middle, end, source, ahead))
        begin = end
    return known, others


class PieceStates(Protocol):
    """States by layer and slot."""

    def read(self, layer: int, slots: torch.Tensor) -> dict[Any, torch.Tensor]: ...

    def write(self, layer: int, slots: torch.Tensor, states: dict[Any, torch.Tensor]) -> None: ...


class PieceGroup(NamedTuple):
    """Pieces of one wave that are read together; n of them, c columns each."""

    rows: torch.Tensor  # [n, 1] int64
    columns: torch.Tensor  # [n, c] int64
    sources: torch.Tensor | None  # [n] int64 slots
    targets: torch.Tensor | None  # [n] int64 slots


class Split:
    """The pieces of one pass, made ready for every layer.

    Args:
        waves: in the order in which they are read.
        states: None where no piece has a source or a target.
    """

    def __init__(self, waves: Iterable[Wave], states: PieceStates | None, device: torch.device):
        self.states = states
        self.groups = [group for wave in waves for group in _groups(wave, device)]


def _groups(wave: Wave, device: torch.device) -> list[PieceGroup]:
    alike: dict[tuple[int, bool, bool], list[TextPiece]] = {}
    for piece in wave:
        kind = (piece.end - piece.begin, piece.source is None, piece.target is None)
        alike.setdefault(kind, []).append(piece)
    return [_group(pieces, device) for pieces in alike.values()]


def _group(pieces: list[TextPiece], device: torch.device) -> PieceGroup:
    rows = torch.tensor([[piece.row] for piece in pieces], device=device)
    columns = torch.tensor([list(range(piece.begin, piece.end)) for piece in pieces], device=device)
    sources, targets = (
        None if slots[0] is None else torch.tensor(slots, device=device)
        for slots in ([piece.source for piece in pieces], [piece.target for piece in pieces])
    )
    return PieceGroup(rows, columns, sources, targets)


class StatePass:
    """The `AttentionContext` of a pass over a model that has layers with a state: `attention` owns
    keys and values, `split` the states."""

    def __init__(self, attention: Any, split: Split):
        self.attention, self.split = attention, split
        self.attend = attention.attend


class StateShape(NamedTuple):
    """One tensor of a layer's state, without its batch dimension."""

    shape: tuple[int, ...]
    dtype: torch.dtype

    @property
    def num_bytes(self) -> int:
        return torch.Size(self.shape).numel() * self.dtype.itemsize


StateShapes = dict[Any, StateShape]  # by the name of the tensor


class StateSlots:
    """`num_slots` states of every layer; a slot holds nothing of use until it was written.

    Args:
        shapes: of each layer's state.
    """

    def __init__(self, shapes: list[StateShapes], num_slots: int, device: torch.device):
        self.num_slots = num_slots
        self.layers: list[dict[Any, torch.Tensor]] = [
            {
                name: torch.zeros(num_slots, *one.shape, dtype=one.dtype, device=device)
                for name, one in layer.items()
            }
            for layer in shapes
        ]

    def read(self, layer: int, slots: torch.Tensor) -> dict[Any, torch.Tensor]:
        """Copies [n, ...], which a layer may write into."""
        return {name: states.index_select(0, slots) for name, states in self.layers[layer].items()}

    def write(self, layer: int, slots: torch.Tensor, states: dict[Any, torch.Tensor]) -> None:
        for name, kept in self.layers[layer].items():
            kept.index_copy_(0, slots, states[name].to(kept.dtype))


class NotedStates:
    """One text's states of every layer, as they come: gives the shapes that slots are made for."""

    def __init__(self) -> None:
        self.states: dict[int, dict[Any, torch.Tensor]] = {}

    def read(self, layer: int, slots: torch.Tensor) -> dict[Any, torch.Tensor]:
        return {name: state.clone() for name, state in self.states[layer].items()}

    def write(self, layer: int, slots: torch.Tensor, states: dict[Any, torch.Tensor]) -> None:
        self.states[layer] = states

    def shapes(self) -> list[StateShapes]:
        return [
            {
                name: StateShape(tuple(state.shape[1:]), state.dtype)
                for name, state in self.states[layer].items()
            }
            for layer in sorted(self.states)
        ]
