"""Passes of speculative rounds by a target that reads whole texts alone: where another keeps keys
and values of the tokens before, the pool keeps these tokens.

Every round reads its texts from their first token on.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple, Protocol

import torch

from draftsmith.drafters.target.attention import AttentionContext
from draftsmith.drafters.target.generate import Sampling, SeededDraw
from draftsmith.errors import UserError
from draftsmith.kernels.attention.paged import PagedPass
from draftsmith.kernels.attention.pool import LayerShape, PagedPool

# Of the one layer of such a pool. float32 has every token id below 2**24.
SHAPE = LayerShape(num_heads=1, key_dim=1, value_dim=1)


class WholeTexts(NamedTuple):
    ids: torch.Tensor  # [B, L], 0 behind the end of a text
    mask: torch.Tensor  # [B, L] bool
    # (row [T], position [T]) of the tokens of the pass
    row: torch.Tensor
    position: torch.Tensor


def token_pool(num_blocks: int, block_size: int, device: torch.device) -> PagedPool:
    return PagedPool.of_layers([SHAPE], num_blocks, block_size, device, torch.float32)


def whole_texts(
    ids: torch.Tensor, positions: torch.Tensor, context: AttentionContext
) -> WholeTexts:
    """Texts up to the last tokens of a pass, `ids` and `positions` [T], which join the pool."""
    if not isinstance(context, PagedPass) or context.layout.tree is not None:
        raise UserError("draft trees cannot be measured with target_server; leave tree out")
    held, (tables, lengths, _) = context.pool.keys[0].view(-1), context.layout
    held[context.slots] = ids.to(held.dtype)
    counts = lengths.tolist()
    ends = lengths.cumsum(dim=0) - 1
    sizes = torch.where(lengths > 0, positions[ends.clamp(min=0)] + 1, 0)
    columns = torch.arange(int(sizes.max()), device=ids.device)
    mask = columns < sizes[:, None]
    row, column = mask.nonzero(as_tuple=True)
    whole = torch.zeros(mask.shape, dtype=torch.int64, device=ids.device)
    whole[mask] = held[context.pool.slots_of(tables, row, column)].long()
    rows = torch.repeat_interleave(lengths, output_size=sum(counts))
    return WholeTexts(whole, mask, rows, positions)


class Answering(Protocol):
    """Part of a target that writes answers."""

    @property
    def device(self) -> torch.device: ...

    @property
    def max_positions(self) -> int: ...

    def states(
        self, input_ids: torch.Tensor, attention_mask: torch.Tensor, taps: Sequence[int]
    ) -> tuple[torch.Tensor | None, torch.Tensor]: ...

    def head(self, hidden: torch.Tensor) -> torch.Tensor: ...


def write_answers(
    target: Answering,
    prompts: Sequence[Sequence[int]],
    max_new_tokens: int,
    sampling: Sampling,
    seeds: Sequence[int],
    eos_token_ids: Sequence[int],
) -> list[list[int]]:
    """Continuations of a batch of prompts, by a pass over the unfinished texts per token; each row
    has its own random stream, that of `Target.answer`."""
    texts = [list(prompt) for prompt in prompts]
    going = [row for row in range(len(texts)) if max_new_tokens > 0]
    while going:
        ids = [torch.tensor(texts[row]) for row in going]
        padded = torch.nn.utils.rnn.pad_sequence(ids, batch_first=True).to(target.device)
        lengths = torch.tensor([len(one) for one in ids], device=target.device)
        mask = torch.arange(padded.shape[1], device=target.device) < lengths[:, None]
        _, hidden = target.states(padded, mask.long(), ())
        last = hidden[torch.arange(len(going), device=target.device), lengths - 1]
        own = torch.tensor([seeds[row] for row in going], device=target.device)
        # With as much padding as makes each position that of its row's next token.
        draw = SeededDraw(sampling, own, padded.shape[1] - lengths)
        tokens = draw(padded, target.head(last).float()).argmax(dim=-1).tolist()
        for row, token in zip(going, tokens, strict=True):
            texts[row].append(token)
        going = [
            row
            for row, token in zip(going, tokens, strict=True)
            if token not in eos_token_ids
            and len(texts[row]) < min(len(prompts[row]) + max_new_tokens, target.max_positions)
        ]
    return [text[len(prompt) :] for text, prompt in zip(texts, prompts, strict=True)]
