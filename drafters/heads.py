"""What feature heads (eagle3, mtp) share: unrolling for training and drafting over the paged pool.

A head reads, at position t, the target's state there and the token at t + 1, and predicts the token at t + 2. Drafting further,
it takes its own previous output for the state. H hidden width, B rows, K draft positions, T ragged positions.
"""

from __future__ import annotations

import itertools
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

    def select(self, chosen: torch.Tensor) -> CatchUp:
        """`chosen` [R] bool."""
        step = HeadStep(self.step.next_hidden[chosen], self.step.head_input[chosen])
        return CatchUp(self.rows[chosen], self.positions[chosen], step)


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
        positions, has_next = batch.positions, batch.has_next  # column t reads the token at t + 1
        context = UnrollPass(batch.segments)
        for depth in range(batch.num_steps):
            step = self.step(embeds, hidden, positions, context)
            yield UnrolledStep(hidden=step.head_input, valid=has_next & (positions >= depth), offset=2)
            context.next_step()
            hidden = torch.nn.functional.pad(step.next_hidden[:, :-1], (0, 0, 1, 0))

    @torch.no_grad()
    def propose(self, inputs: DraftInputs) -> Proposal:
        caught = self._catch_up(inputs)
        drawing = Drawing(inputs, vocab_size=self.config.vocab_size, vocab_map=self.vocab_map)
        if caught is None:
            return drawing.proposal()
        rows, positions, step, tokens = caught.rows, caught.positions, caught.step, inputs.tokens
        indices: list[int] = rows.tolist()
        tables, ones = inputs.block_tables[rows], torch.ones_like(rows)
        for depth in range(drawing.depth):
            alive = [drawing.budgets[index] > depth for index in indices]
            if not any(alive):
                break
            if not all(alive):
                kept = torch.tensor(alive, device=rows.device)
                indices = [index for index, stays in zip(indices, alive) if stays]
                rows, positions, tables, ones = rows[kept], positions[kept], tables[kept], ones[kept]
                step = HeadStep(step.next_hidden[kept], step.head_input[kept])
                tokens = tokens[kept] if depth > 0 else tokens
            if depth > 0:
                positions = positions + 1
                context = PagedPass(inputs.pool, tables, positions, ones)
                step = self.read_ragged(self.embed(tokens), step.next_hidden, positions, context)
            # The state at position t predicts t + 2.
            tokens = drawing.draw(rows, depth, self.draft_logits(step.head_input), positions + 2)
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
        device = inputs.tokens.device
        rows, lengths, following, places = [], [], [], []
        begin = 0
        for row, (start, length) in enumerate(zip(inputs.starts.tolist(), inputs.lengths.tolist())):
            if length > 1:  # the last token of each row has no state yet
                rows.append(row)
                lengths.append(length - 1)
                following += range(begin + 1, begin + length)
                places += range(start, start + length - 1)
            begin += length
        if not rows:
            return None
        positions, which = torch.tensor(places, device=device), torch.tensor(rows, device=device)
        context = PagedPass(inputs.pool, inputs.block_tables[which], positions, torch.tensor(lengths, device=device))
        embeds = self.embed(inputs.tokens[torch.tensor(following, device=device)])
        step = self.read_ragged(embeds, self.fused(inputs.taps), positions, context)
        last = torch.tensor([end - 1 for end in itertools.accumulate(lengths)], device=device)
        return CatchUp(which, positions[last], HeadStep(step.next_hidden[last], step.head_input[last]))

    def read_ragged(
        self, embeds: torch.Tensor, hidden: torch.Tensor, positions: torch.Tensor, context: AttentionContext
    ) -> HeadStep:
        """[T, H] -> [T, H]."""
        if self._recorded is None:
            step = self.step(embeds[None], hidden[None], positions[None], context)
        else:
            step = HeadStep(*self._recorded.step(embeds[None], hidden[None], positions[None], attention_context=context))
        return HeadStep(step.next_hidden[0], step.head_input[0])
