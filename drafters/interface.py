"""Drafter interfaces of the engine and the trainer, and the values they exchange. Shapes: B rows, K
draft positions, V target vocabulary, T ragged tokens."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol, get_args, runtime_checkable

import torch

from draftsmith.drafters.target.packed_pass import positions_of
from draftsmith.drafters.tree_shape import GrownShape, TreeShape
from draftsmith.errors import UserError
from draftsmith.kernels.attention.pool import PagedPool
from draftsmith.kernels.cuda_graphs import GraphRoom
from draftsmith.kernels.sampling.filters import SamplingRows

if TYPE_CHECKING:
    from draftsmith.drafters.layouts.folder import DraftFolder
    from draftsmith.drafters.target.target import Target

# (raw logits [R, V] in target ids, rows [R], tokens drafted so far of each [R, D], -1 is none) ->
# logits [R, V] under the request's penalties, bans and masks.
Adjust = Callable[[torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor]


@dataclass(frozen=True, kw_only=True)
class DraftInputs:
    """One propose call for B requests, ragged: row b owns `lengths[b]` consecutive tokens.

    `starts`, `lengths` and `num_draft` are the host's: what a round looks like is known without
    asking a device. Row b's draft cache already covers positions `0 .. starts[b]-1`. `tokens` are
    the committed tokens from position `starts[b]` to the last one, `n_b = starts[b] + lengths[b] -
    1`, whose successor is to be drafted. The target has not yet run on the last token, so its taps
    exist for one position less.
    """

    tokens: torch.Tensor  # [T] int64
    starts: torch.Tensor  # [B] int64, on the host
    lengths: torch.Tensor  # [B] int64, >= 1, on the host
    # [T - B, taps * hidden]: positions starts[b] .. n_b - 1 of each row; None when the drafter
    # reads none
    taps: torch.Tensor | None
    # [B] int64, on the host, k of each row, 0 <= k; rows with 0 only catch up
    num_draft: torch.Tensor
    sampling: SamplingRows  # the distribution the request asked for, row by row
    # [B] int64, of this round alone; draws use (seed, position of the drawn token, Purpose.DRAFT)
    seeds: torch.Tensor
    # this drafter's own keys and values; block ids are shared with the target's pool
    pool: PagedPool | None
    block_tables: torch.Tensor  # [B, max_blocks] int64
    # all committed tokens of each row (prompt included), for drafters that match text
    histories: list[list[int]]
    # request id of each row, for drafters with state per request; empty when the caller has none
    request_ids: list[str] = field(default_factory=list)
    # whether a row may be drafted from other requests' text; empty: all may
    shares: list[bool] = field(default_factory=list)
    adjust: Adjust | None = None  # None when `sampling` is all that any row asks for
    # A drafter that guesses how its drafts survive ends a row where the chance of all being kept
    # falls below this; it decides on each before it is drawn (invariant 4). 0: never.
    least_survival: float = 0.0
    # A chain goes on only while the product of the draft's largest probabilities, at temperature 1
    # and of the tokens drafted so far, is at least this; for drafters that `EndsChains`. 0: always.
    least_confidence: float = 0.0

    @property
    def own_pool(self) -> PagedPool:
        """`pool` of a drafter that keeps keys and values."""
        if self.pool is None:
            raise ValueError("this drafter keeps keys and values; give pool")
        return self.pool


@dataclass(frozen=True, kw_only=True)
class Proposal:
    """Drafted tokens and the distribution they were really sampled from: a chain, or a tree when
    `parents` is given."""

    tokens: torch.Tensor  # [B, K] int64, -1 beyond lengths
    lengths: torch.Tensor  # [B] int64, <= num_draft
    # [B, K, V] float32, processed (filtered, tempered) as sampled; None = deterministic, one-hot q
    logits: torch.Tensor | None
    # [B, K] int64, as in `kernels/verify/verdict.py: DraftTree`; `logits` is then [Q, V]
    parents: torch.Tensor | None = None
    # [B, K + 1] int64: the row of `logits` that the children of each slot were drawn from
    q_rows: torch.Tensor | None = None
    # [B, K] bool, False where a distribution had no mass; None: see `logits`
    has_mass: torch.Tensor | None = None
    # rows copied from text, whatever `logits` are: no temperature had a part in them
    copied: frozenset[int] = frozenset()


class ServingDrafter(Protocol):
    """The engine's whole view of a drafter."""

    family: str
    taps: tuple[int, ...]  # raw layer ids read from the target; () for none

    def new_pool(
        self, num_blocks: int, block_size: int, device: torch.device, dtype: torch.dtype
    ) -> PagedPool | None: ...

    def propose(self, inputs: DraftInputs) -> Proposal: ...

    def cached_after(self, last: int, drafted: int, accepted: int) -> int:
        """Number of leading positions of the draft cache that are right once `accepted` of
        `drafted` tokens after position `last` were accepted."""
        ...


@runtime_checkable
class Remembering(Protocol):
    """A drafter that keeps something of each request between its rounds, or after its end."""

    def finished(self, request_id: str, tokens: list[int]) -> None:
        """The request has ended with `tokens`, prompt and answer; they are empty when nothing of it
        may be kept."""
        ...


def draft_positions(drafter: ServingDrafter | None) -> int | None:
    """Length in tokens up to which a drafter may draft, its `max_positions`; None where it has no
    positions of its own."""
    return getattr(drafter, "max_positions", None)


@runtime_checkable
class EndsChains(Protocol):
    """A drafter that may heed `DraftInputs.least_confidence`: every further token costs a pass."""

    ends_chains: bool


@runtime_checkable
class GrowsTrees(Protocol):
    """A drafter that can offer several continuations at once. Its `shapes`, where it has any, are
    the classes of `TreeShape` that it grows."""

    def propose_tree(self, inputs: DraftInputs, shape: TreeShape) -> Proposal:
        """Propose trees of at most `num_draft` nodes per row, see `drafters/tree_shape.py`."""
        ...


def check_grows(drafter: ServingDrafter | None, tree: TreeShape) -> None:
    """Refuse a tree that the drafter does not grow."""
    shapes = getattr(drafter, "shapes", get_args(GrownShape))
    if isinstance(drafter, GrowsTrees) and isinstance(tree, shapes):
        return
    family = "no drafter" if drafter is None else f"a {drafter.family} drafter"
    grows = "grows other shapes" if isinstance(drafter, GrowsTrees) else "grows none"
    raise UserError(
        f"tree is given with {family}, which {grows}; leave it out, draft with eagle3, eagle1 or "
        "mtp, or take the tree 'medusa' or 'choices:...' for a medusa draft"
    )


@dataclass(frozen=True, kw_only=True)
class TokenBatch:
    """Rows of text, right padded: B rows of L tokens."""

    input_ids: torch.Tensor  # [B, L] int64
    attention_mask: torch.Tensor  # [B, L] 1 for real tokens
    # [B, L] int64: several texts per row, none of which may see another; see packed_pass.py. None:
    # every row is one text
    segments: torch.Tensor | None = None

    @property
    def positions(self) -> torch.Tensor:
        """[B, L] or [1, L], of each token in its own text."""
        if self.segments is not None:
            return positions_of(self.segments)
        return torch.arange(self.input_ids.shape[1], device=self.input_ids.device)[None]

    @property
    def has_next(self) -> torch.Tensor:
        """[B, L] bool: the token at t + 1 is real and of the same text."""
        following = self.attention_mask[:, 1:].bool()
        if self.segments is not None:
            following = following & (self.segments[:, 1:] == self.segments[:, :-1])
        return torch.nn.functional.pad(following, (0, 1))


@dataclass(frozen=True, kw_only=True)
class TextBatch(TokenBatch):
    """Text to train or to evaluate on, the same value from the collator to the loss."""

    # [B, L] float32, weight in the loss of predicting the token at j; 0 is not trained
    weights: torch.Tensor
    # [B, L] int64, number of each token among all tokens of a data folder; -1 for a token of none.
    # None: no token is of one
    token_index: torch.Tensor | None = None

    def to(self, device: torch.device) -> TextBatch:
        return self._mapped(lambda values: values.to(device))

    def pin_memory(self) -> TextBatch:
        """The batch in page-locked memory; torch's loader calls it where it pins."""
        return self._mapped(torch.Tensor.pin_memory)

    def _mapped(self, change: Callable[[torch.Tensor], torch.Tensor]) -> TextBatch:
        values = vars(self).items()
        return TextBatch(**{name: None if one is None else change(one) for name, one in values})

    def unrolled(self, taps: torch.Tensor | None, num_steps: int) -> UnrollBatch:
        """Inputs of a drafter that unrolls over this text."""
        return UnrollBatch(
            input_ids=self.input_ids,
            attention_mask=self.attention_mask,
            segments=self.segments,
            taps=taps,
            num_steps=num_steps,
            first=int((self.weights > 0).any(dim=0).int().argmax()),
        )


@dataclass(frozen=True, kw_only=True)
class UnrollBatch(TokenBatch):
    """Teacher-forced inputs of a drafter's unroll."""

    taps: torch.Tensor | None  # [B, L, taps * hidden]
    num_steps: int  # unrolled draft positions
    # no token before this position counts, so what is drafted for them may be anything
    first: int = 0


@dataclass(frozen=True, kw_only=True)
class UnrolledStep:
    """Step s (from 0) of the unroll. `hidden[:, t]` is the draft's state that predicts the token at
    position t + 2 for a head (t + 1 for a language model, see `offset`), drafted at depth s of a
    round."""

    hidden: torch.Tensor  # [B, L, H], what the draft head multiplies
    valid: torch.Tensor  # [B, L] bool: enough real context for this depth
    # the predicted token is at position t + offset; the target's distribution for it comes from its
    # state at t + offset - 1
    offset: int
    # [B, L] logits of the draft's guess of its own alpha, made before x is; None: no guess
    confidence: torch.Tensor | None = None
    # [Vd, H] what `hidden` of this depth is multiplied by; None: the drafter's `head_weight`
    head: torch.Tensor | None = None


class TrainedDrafter(ServingDrafter, Protocol):
    """A draft with weights: also an `nn.Module`, whose parameters are its own; what it shares with
    the target is not in it."""

    def save(self, folder: Path) -> None: ...

    def state_dict(self) -> dict[str, torch.Tensor]: ...

    def load_state_dict(self, state_dict: Mapping[str, torch.Tensor]) -> Any: ...

    def parameters(self) -> Iterator[torch.nn.Parameter]: ...

    def unroll(self, batch: UnrollBatch) -> Iterator[UnrolledStep]: ...

    def head_weight(self) -> torch.Tensor:
        """[Vd, H]: draft logits are `hidden @ head_weight().T`, where a depth has no head of its
        own."""
        ...

    @property
    def vocab_map(self) -> torch.Tensor | None:
        """[Vd] int64, the target's id of each draft id; None when they are the same."""
        ...

    def to(self, *, device: torch.device, dtype: torch.dtype) -> TrainedDrafter: ...

    def eval(self) -> TrainedDrafter: ...


class Family(Protocol):
    """Source of the drafts of a family: their class, or a class that chooses among several."""

    def create(
        self, options: Any, target: Target, *, seed: int, token_counts: torch.Tensor | None = None
    ) -> TrainedDrafter:
        """A new draft in float32. `token_counts` [V] int64: occurrences of each target id in the
        training data."""
        ...

    def matches(self, draft: DraftFolder, target: Target | None = None) -> bool:
        """Recognise a folder made elsewhere; `target` is the one it is for."""
        ...

    def load(self, folder: Path, target: Target) -> TrainedDrafter:
        """Reads what a draft's `save` wrote, or an equal folder made elsewhere;
        `drafters/checkpoint.py` adds the checks of the record."""
        ...


def head_of(step: UnrolledStep, drafter: HasHead) -> torch.Tensor:
    """[Vd, H], what the step's states are multiplied by."""
    return drafter.head_weight() if step.head is None else step.head


class HasHead(Protocol):
    def head_weight(self) -> torch.Tensor: ...


class ForwardCapturable(ABC):
    """A drafter whose forward can be captured and replayed."""

    @abstractmethod
    def capture_forward(self) -> None:
        """Called once before serving. The drafter's weights may be written in place afterwards."""


class Capturable(ABC):
    """A drafter whose steps can be captured as CUDA graphs."""

    @abstractmethod
    def capture(self, room: GraphRoom) -> None:
        """Called once before serving on an accelerator. Weights may be written in place
        afterwards."""
