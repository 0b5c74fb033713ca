"""Two texts read side by side in passes of given sizes, through blocks out of order."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch

from draftsmith.drafters.target.target import Target, TargetOutput
from draftsmith.kernels.attention.paged import PagedPass
from draftsmith.kernels.attention.pool import PagedPool

BLOCKS, BLOCK = 12, 4  # for each of the texts


class PagedTexts(NamedTuple):
    texts: torch.Tensor  # [2, BLOCKS * BLOCK]
    outputs: list[TargetOutput]  # of each pass, with every token's logits
    counts: Sequence[tuple[int, int]]  # of each pass
    pool: PagedPool

    @property
    def everything(self) -> list[torch.Tensor]:
        told = [part for output in self.outputs for part in (output.logits, output.taps)]
        return [*told, *self.pool.keys, *self.pool.values]

    def of_row(self, row: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Logits and taps of one text."""
        parts = [slice(0, one) if row == 0 else slice(one, one + two) for one, two in self.counts]
        pairs = list(zip(self.outputs, parts, strict=True))
        logits = torch.cat([output.logits[part] for output, part in pairs])
        return logits, torch.cat([output.taps[part] for output, part in pairs])


def read_two(
    target: Target,
    counts: Sequence[tuple[int, int]],
    taps: tuple[int, ...] = (0,),
    impl: str = "auto",
) -> PagedTexts:
    """Each pass brings so many tokens of each text."""
    generator = torch.Generator().manual_seed(3)
    pool = target.new_pool(num_blocks=2 * BLOCKS, block_size=BLOCK)
    tables = torch.randperm(2 * BLOCKS, generator=generator).view(2, BLOCKS)
    texts = torch.randint(3, target.vocab_size, (2, BLOCKS * BLOCK), generator=generator)
    done, outputs = [0, 0], []
    for count in counts:
        rows = [row for row in range(2) if count[row]]
        parts = [torch.arange(done[row], done[row] + count[row]) for row in rows]
        ids = torch.cat([texts[row, part] for row, part in zip(rows, parts)])
        positions, lengths = torch.cat(parts), torch.tensor([len(part) for part in parts])
        context = PagedPass(pool, tables[rows], positions, lengths, impl=impl)
        every = torch.arange(len(ids))
        outputs.append(target.forward(ids[None], positions[None], context, every, taps))
        done = [one + two for one, two in zip(done, count)]
    return PagedTexts(texts, outputs, counts, pool)
