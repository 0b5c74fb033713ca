"""What feature heads (eagle3, mtp) share: unrolling for training and drafting over the paged pool.

A head reads, at position t, the target's state there and the token at t + 1, and predicts the token at t + 2. Drafting further,
it takes its own previous output for the state. H hidden width, B rows, K draft positions, T ragged positions.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Iterator
from typing import NamedTuple

import torch
from torch import nn
from transformers import LlamaConfig

from draftsmith.drafters.attention import AttentionContext
from draftsmith.drafters.drawing import Drawing
from draftsmith.drafters.interface import DraftInputs, Proposal, UnrollBatch, UnrolledStep
from draftsmith.drafters.recorded import Recordable
from draftsmith.drafters.recorded_head import RecordedHead, record_head
from draftsmith.drafters.tree_growth import grow
from draftsmith.drafters.tree_shape import TreeShape
from draftsmith.drafters.unroll import UnrollPass
from draftsmith.kernels.paged_attention import PagedPass, PagedPool


class HeadStep(NamedTuple):
    next_hidden: torch.Tensor  # [..., H], taken for the state at the next position
    head_input: torch.Tensor  # [..., H], what the draft head multiplies


class CatchUp(NamedTuple):
    """The head's state after the true states it had not read yet; rows without any have nothing to draft from."""

    rows: torch.Tensor  # [R] indices of the rows that can draft
    positions: torch.Tensor  # [R] their last position with a true state
    step: HeadStep  # [R, H]


class FeatureHead(nn.Module, Recordable):
    family: str
    taps: tuple[int, ...]
    config: LlamaConfig
    _recorded: RecordedHead | None = None

    @abstractmethod
    def fuse(self, taps: torch.Tensor) -> torch.Tensor:
        """[..., n * H_t] true states -> [..., H]."""

    @abstractmethod
    def embed(self, ids: torch.Tensor) -> torch.Tensor: ...

    @abstractmethod
    def step(self, embeds: torch.Tensor, hidden: torch.Tensor, positions: torch.Tensor, context: AttentionContext) -> HeadStep:
        """embeds and hidden [b, t, H], positions [b, t] or [1, t]."""

    @abstractmethod
    def head_weight(self) -> torch.Tensor: ...

    def record(self) -> None:
        if self._recorded is None and self.head_weight().device.type == "cpu":
            self._recorded = record_head(self)

    def draft_logits(self, head_input: torch.Tensor) -> torch.Tensor:
        """[T, H] -> raw [T, Vd]; drafting only, as are `fused` and `read_ragged`."""
        return head_input @ self.head_weight().T if self._recorded is None else self._recorded.logits(head_input)

    def fused(self, taps: torch.Tensor) -> torch.Tensor:
        return self.fuse(taps) if self._recorded is None else self._recorded.fuse(taps)

    @property
    @abstractmethod
    def vocab_map(self) -> torch.Tensor | None: ...

    def new_pool(self, num_blocks: int, block_size: int, device: torch.device, dtype: torch.dtype) -> PagedPool:
        return PagedPool.empty(
            num_layers=self.config.num_hidden_layers,
            num_blocks=num_blocks,
            block_size=block_size,
            num_kv_heads=self.config.num_key_value_heads,
            key_dim=self.config.head_dim,
            device=device,
            dtype=dtype,
        )

    def unroll(self, batch: UnrollBatch) -> Iterator[UnrolledStep]:
        next_ids = torch.roll(batch.input_ids, -1, dims=1)  # the last column gets a wrong one, and nothing to predict
        embeds = self.embed(next_ids)
        hidden = self.fuse(batch.taps)
        columns = torch.arange(next_ids.shape[1], device=next_ids.device)[None]
        # Column t reads the token at t + 1, which must be real.
        real = torch.nn.functional.pad(batch.attention_mask[:, 1:], (0, 1)).bool()
        context = UnrollPass()
        for depth in range(batch.num_steps):
            step = self.step(embeds, hidden, columns, context)
            yield UnrolledStep(hidden=step.head_input, valid=real & (columns >= depth), offset=2)
            context.next_step()
            hidden = torch.nn.functional.pad(step.next_hidden[:, :-1], (0, 0, 1, 0))

    @torch.no_grad()
    def propose(self, inputs: DraftInputs) -> Proposal:
        caught = self._catch_up(inputs)
        drawing = Drawing(inputs, vocab_size=self.config.vocab_size, vocab_map=self.vocab_map)
        if caught is None:
            return drawing.proposal()
        rows, positions, step = caught.rows, caught.positions, caught.step
        for depth in range(drawing.depth):
            alive = inputs.num_draft[rows] > depth
            if not alive.all():
                rows, positions = rows[alive], positions[alive]
                step = HeadStep(step.next_hidden[alive], step.head_input[alive])
            if len(rows) == 0:
                break
            if depth > 0:
                positions = positions + 1
                context = PagedPass(inputs.pool, inputs.block_tables[rows], positions, torch.ones_like(rows))
                embeds = self.embed(drawing.tokens[rows, depth - 1])
                step = self.read_ragged(embeds, step.next_hidden, positions, context)
            # The state at position t predicts t + 2.
            drawing.draw(rows, depth, self.draft_logits(step.head_input), positions + 2)
        return drawing.proposal()

    @torch.no_grad()
    def propose_tree(self, inputs: DraftInputs, shape: TreeShape) -> Proposal:
        return grow(self, inputs, self._catch_up(inputs), shape)

    def cached_after(self, last: int, drafted: int, accepted: int) -> int:
        """Drafted positions were written from the head's own states; they are read again with the target's."""
        return last

    def _catch_up(self, inputs: DraftInputs) -> CatchUp | None:
        """Reads the true states of positions `starts .. starts + lengths - 2` of every row."""
        if self._recorded is not None:
            self._recorded.refresh()  # a swap writes new weights in place
        pairs = inputs.lengths - 1
        rows = pairs.nonzero()[:, 0]
        if len(rows) == 0:
            return None
        lengths = pairs[rows]
        ends = inputs.lengths.cumsum(0)
        is_state = torch.ones_like(inputs.tokens, dtype=torch.bool)
        is_state[ends - 1] = False  # the last token of each row has no state yet
        is_next = torch.ones_like(is_state)
        is_next[ends - inputs.lengths] = False
        offsets = torch.arange(len(inputs.tokens), device=ends.device) - torch.repeat_interleave(
            ends - inputs.lengths, inputs.lengths
        )
        positions = (torch.repeat_interleave(inputs.starts, inputs.lengths) + offsets)[is_state]
        context = PagedPass(inputs.pool, inputs.block_tables[rows], positions, lengths)
        step = self.read_ragged(self.embed(inputs.tokens[is_next]), self.fused(inputs.taps), positions, context)
        last = lengths.cumsum(0) - 1
        return CatchUp(rows, positions[last], HeadStep(step.next_hidden[last], step.head_input[last]))

    def read_ragged(
        self, embeds: torch.Tensor, hidden: torch.Tensor, positions: torch.Tensor, context: AttentionContext
    ) -> HeadStep:
        """[T, H] -> [T, H]."""
        if self._recorded is None:
            step = self.step(embeds[None], hidden[None], positions[None], context)
        else:
            step = HeadStep(*self._recorded.step(embeds[None], hidden[None], positions[None], attention_context=context))
        return HeadStep(step.next_hidden[0], step.head_input[0])
