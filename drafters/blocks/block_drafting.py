"""Drafting of blocks: keys and values of the context are written, a block is read in one pass, and
its drafts are drawn depth by depth; as it is, and as a graph holds it.

Legend: R rows that draft, S slots of a block, T tokens of a pass, H hidden width.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple

import torch

from draftsmith.drafters.autoregressive.call_graphs import CallLoop
from draftsmith.drafters.autoregressive.draft_sampler import DraftSampler, DraftStep
from draftsmith.drafters.autoregressive.padded_round import PaddedRound, RoundShape
from draftsmith.drafters.blocks.shape import BlockShape
from draftsmith.drafters.interface import DraftInputs
from draftsmith.drafters.target.attention import AttentionContext
from draftsmith.kernels.attention.paged import PagedPass
from draftsmith.kernels.attention.pool import PagedPool, PassLayout, Scoring, TreeLayout
from draftsmith.kernels.constants import NULL_BLOCK
from draftsmith.kernels.dispatch import reads_freely


class Block(NamedTuple):
    """States read for R rows. Slots are counted over all rows."""

    states: torch.Tensor  # [T, H] normed
    begins: torch.Tensor  # [R] first slot
    newest: torch.Tensor  # [R] position of the newest token
    tokens: torch.Tensor  # [R] the newest token


class DraftsBlocks(CallLoop):
    """A drafter of blocks; what its parts compute is the family's."""

    max_depth: int
    shape: BlockShape
    from_anchor = False  # whether the first draft is read off the newest token's own slot

    @abstractmethod
    def head_weight(self) -> torch.Tensor: ...

    @abstractmethod
    def head_input(self, states: torch.Tensor, previous: torch.Tensor) -> torch.Tensor: ...

    @abstractmethod
    def confidence(self, head_input: torch.Tensor) -> torch.Tensor | None: ...

    @abstractmethod
    def context(self, taps: torch.Tensor) -> torch.Tensor: ...

    @abstractmethod
    def context_keys(
        self, context: torch.Tensor, positions: torch.Tensor
    ) -> Iterator[tuple[torch.Tensor, torch.Tensor]]: ...

    @abstractmethod
    def body(
        self, ids: torch.Tensor, positions: torch.Tensor, context: AttentionContext
    ) -> torch.Tensor: ...

    def draft_call(self, inputs: DraftInputs, sampler: DraftSampler) -> None:
        # A block without any context was never trained.
        rows = ((inputs.num_draft > 0) & (inputs.starts + inputs.lengths > 1)).nonzero()[:, 0]
        context, blocks = context_columns(inputs), self._block_columns(inputs, rows)
        plan = sampler.plan(rows.tolist(), self.max_depth)
        parts, depths = plan.sent(inputs.tokens.device, *context, *blocks)
        self._read_context(inputs, *parts[: len(context)])
        if len(rows) == 0:
            return
        block = self._read_blocks(inputs, parts[len(context) :])
        begins, newest, tokens = block.begins, block.newest, block.tokens
        head, skipped = self.head_weight().T, 0 if self.from_anchor else 1
        # the chance that all drafts of a row are kept, as guessed
        survival = torch.ones_like(tokens, dtype=torch.float32)
        offered = torch.zeros_like(sampler.lengths)
        for depth, (chosen, kept, _) in enumerate(depths):
            if kept is not None:
                begins, newest, tokens, survival = (
                    begins[kept],
                    newest[kept],
                    tokens[kept],
                    survival[kept],
                )
            head_input = self.head_input(block.states[begins + depth + skipped], tokens)
            confidence = self.confidence(head_input) if inputs.least_survival > 0 else None
            if confidence is not None:
                # Before the draft is drawn: whether it is offered must not depend on what it is
                # (invariant 4).
                survival = survival * torch.sigmoid(confidence.float())
                sure = survival >= inputs.least_survival
                if reads_freely(sure.device) and not sure.any():
                    break
                offered[chosen] += sure
            else:
                offered[chosen] += 1
            tokens = sampler.draw(chosen, depth, head_input @ head, newest + 1 + depth)
        if inputs.least_survival > 0:
            sampler.shorten(offered)

    def cached_after(self, last: int, drafted: int, accepted: int) -> int:
        """The block's own keys stand where the context's come next."""
        return last

    def _read_context(
        self, inputs: DraftInputs, rows: torch.Tensor, positions: torch.Tensor
    ) -> None:
        """Writes keys and values of the positions [T] of `rows` [T] whose true states are new."""
        if len(rows) > 0:
            slots = inputs.own_pool.slots_of(inputs.block_tables, rows, positions)
            self._write_context(inputs.own_pool, slots, self.context(inputs.taps), positions)

    def _write_context(
        self, pool: PagedPool, slots: torch.Tensor, context: torch.Tensor, positions: torch.Tensor
    ) -> None:
        """Keys and values of context states [T, H] go to `slots` [T]."""
        pairs = self.context_keys(context[None], positions[None])
        for (keys, values), pool_keys, pool_values in zip(
            pairs, pool.keys, pool.values, strict=True
        ):
            pool_keys.index_copy_(0, slots, keys[0].transpose(0, 1).to(pool_keys.dtype))
            pool_values.index_copy_(0, slots, values[0].transpose(0, 1).to(pool_values.dtype))

    def _block_columns(self, inputs: DraftInputs, rows: torch.Tensor) -> tuple[torch.Tensor, ...]:
        """Numbers for the device of the blocks of `rows` [R], which go from the newest token on."""
        newest = (inputs.starts + inputs.lengths - 1)[rows]
        counts = inputs.num_draft[rows].clamp(max=self.max_depth) + (0 if self.from_anchor else 1)
        begins = counts.cumsum(0) - counts
        which = torch.repeat_interleave(counts)
        slot = torch.arange(len(which)) - begins[which]
        ends = inputs.lengths.cumsum(0)[rows] - 1
        places = (newest[which] + slot, newest[which], counts[which])
        return (rows, begins, newest, counts, *places, ends)

    def _read_blocks(self, inputs: DraftInputs, parts: Sequence[torch.Tensor]) -> Block:
        """`parts` are the `_block_columns`, on the device."""
        rows, begins, newest, counts, positions, first, size, ends = parts
        tokens = inputs.tokens[ends]
        ids = torch.full_like(positions, self.shape.mask_token).index_copy_(0, begins, tokens)
        layout = PassLayout(
            inputs.block_tables[rows],
            positions,
            counts,
            TreeLayout(kv_indices=positions, ancestors=(1 << size) - 1, first=first),
        )
        states = self._read_slots(inputs.own_pool, ids, layout)
        return Block(states, begins, newest, tokens)

    def _read_slots(self, pool: PagedPool, ids: torch.Tensor, layout: PassLayout) -> torch.Tensor:
        """Slots [T] of blocks -> normed states [T, H]. A causal block is a chain; in another every
        slot sees all of its block, as the tree of `layout` says."""
        context = LayerPasses(
            self.shape.is_causal,
            lambda causal: PagedPass(
                pool,
                layout.block_tables,
                layout.positions,
                layout.lengths,
                tree=None if causal else layout.tree,
            ),
        )
        return self.body(ids[None], layout.positions[None], context)[0]

    def draft_padded(
        self, padded: PaddedRound, shape: RoundShape, pool: PagedPool | None
    ) -> list[DraftStep]:
        slots = padded.slots(shape.width)
        positions, taps = (padded.starts[:, None] + slots).flatten(), padded.taps(slots)
        assert taps is not None and pool is not None
        rows = torch.arange(len(slots), device=slots.device)
        owners = rows[:, None].expand_as(slots).flatten()
        places = pool.slots_of(padded.tables, owners, positions)
        self._write_context(pool, places, self.context(taps.flatten(0, 1)), positions)
        newest, tokens = padded.starts + padded.last + 1, padded.tokens(padded.last[:, None])[:, 0]
        states = self._padded_blocks(padded, shape, pool, tokens)
        head, skipped = self.head_weight().T, 0 if self.from_anchor else 1
        drawn: list[DraftStep] = []
        for depth in range(shape.depths):
            head_input = self.head_input(states[:, depth + skipped], tokens)
            drawn.append(padded.draw(head_input @ head, newest + 1 + depth, self.vocab_map))
            tokens = drawn[-1].tokens
        return drawn

    def _padded_blocks(
        self, padded: PaddedRound, shape: RoundShape, pool: PagedPool, tokens: torch.Tensor
    ) -> torch.Tensor:
        """States [R, S, H] of the blocks from the newest `tokens` [R] on. The last slot of a row
        that drafts less stands for the others, too."""
        skipped = 0 if self.from_anchor else 1
        sizes = padded.budgets.clamp(max=shape.depths) + skipped
        width, newest = shape.depths + skipped, padded.starts + padded.last + 1
        index = torch.arange(width, device=sizes.device).minimum((sizes - 1).clamp(min=0)[:, None])
        ids = torch.where(index == 0, tokens[:, None], self.shape.mask_token).flatten()
        positions = (newest[:, None] + index).flatten()
        # A row that drafts nothing has no place for a block.
        tables = torch.where((padded.budgets > 0)[:, None], padded.tables, NULL_BLOCK)
        seen, first = (
            one[:, None].expand_as(index).flatten()
            for one in ((1 << sizes.clamp(min=1)) - 1, newest)
        )
        tree = TreeLayout(kv_indices=positions, ancestors=seen, first=first)
        layout = PassLayout(tables, positions, torch.full_like(sizes, width), tree)
        return self._read_slots(pool, ids, layout).unflatten(0, (-1, width))


def context_columns(inputs: DraftInputs) -> tuple[torch.Tensor, torch.Tensor]:
    """(row [T], position [T]) of the true states that are new, on the host."""
    counts = inputs.lengths - 1
    rows = torch.repeat_interleave(counts)
    offsets = torch.arange(len(rows)) - (counts.cumsum(0) - counts)[rows]
    return rows, inputs.starts[rows] + offsets


class LayerPasses:
    """An `AttentionContext`: of each layer, the pass that is causal or not as `is_causal` says."""

    def __init__(self, is_causal: Callable[[int], bool], make: Callable[[bool], AttentionContext]):
        self.is_causal, self.make = is_causal, make
        self.passes: dict[bool, AttentionContext] = {}

    def attend(
        self, layer: int, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, rule: Scoring
    ) -> torch.Tensor:
        causal = self.is_causal(layer)
        if causal not in self.passes:
            self.passes[causal] = self.make(causal)
        return self.passes[causal].attend(layer, query, key, value, rule)
