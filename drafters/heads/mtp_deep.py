"""Several MTP modules, one for each drafted token (DeepSeek-V3, arXiv 2412.19437, section 2.2).

    module m (from 0) at position t reads the state of module m - 1 there (m = 0: the target's) and
    the token at t + 1 + m, and predicts the token at t + 2 + m

Each attends its own keys, so it has to read every position: in serving, positions that it read with
tokens which were then rejected, or not drafted, are read again with the next proposal. B rows, L
columns, T ragged positions, N modules.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from pathlib import Path

import torch
from torch import nn
from torch.nn.functional import pad

from draftsmith.drafters.autoregressive.catch_up import Unread
from draftsmith.drafters.autoregressive.draft_loop import DraftLoop
from draftsmith.drafters.autoregressive.draft_sampler import DraftSampler
from draftsmith.drafters.heads.mtp_deepseek import AppendedMtp
from draftsmith.drafters.interface import DraftInputs, UnrollBatch, UnrolledStep
from draftsmith.drafters.options import MtpOptions
from draftsmith.drafters.target.target import Target
from draftsmith.drafters.unrolled.unroll import UnrollPass
from draftsmith.drafters.weights import ReadBytes, weight_bytes, write_weights
from draftsmith.kernels.attention.paged import PagedPass
from draftsmith.kernels.attention.pool import PagedPool


class DeepMtp(nn.Module, DraftLoop):
    family = "mtp"
    vocab_map = None

    def __init__(self, heads: Sequence[AppendedMtp]):
        super().__init__()
        for index, head in enumerate(heads):
            head.layer.self_attn.layer_idx = index  # of the pool
        self.heads: Sequence[AppendedMtp] = nn.ModuleList(heads)
        self.taps, self.config, self.max_depth = heads[0].taps, heads[0].config, len(heads)
        self.vocab_size = self.config.vocab_size

    @classmethod
    def create(cls, options: MtpOptions, target: Target, *, seed: int) -> DeepMtp:
        seeds = range(seed, seed + options.modules)
        return cls([AppendedMtp.create(options, target, seed=one) for one in seeds])

    @classmethod
    def load(cls, folder: Path, target: Target, num_modules: int) -> DeepMtp:
        return cls([AppendedMtp.load(folder, target, index) for index in range(num_modules)])

    def save(self, folder: Path) -> None:
        config = self.heads[0].config_values(self.max_depth)
        named: dict[str, torch.Tensor] = {}
        for index, head in enumerate(self.heads):
            named |= head.published(config, index)
        write_weights(Path(folder), config, named)

    @property
    def max_positions(self) -> int:
        return self.heads[0].max_positions

    def head_weight(self) -> torch.Tensor:
        return self.heads[0].head_weight()

    def read_bytes(self) -> ReadBytes:
        """All modules read every position, however few tokens are drafted."""
        table = weight_bytes([], self.head_weight())
        return ReadBytes(proposal=weight_bytes([self]), token=table)

    def new_pool(
        self, num_blocks: int, block_size: int, device: torch.device, dtype: torch.dtype
    ) -> PagedPool:
        pools = [head.new_pool(num_blocks, block_size, device, dtype) for head in self.heads]
        keys = [key for pool in pools for key in pool.keys]
        return PagedPool(keys, [value for pool in pools for value in pool.values], block_size)

    def cached_after(self, last: int, drafted: int, accepted: int) -> int:
        """The last module reads `max_depth` tokens ahead of its position, and later ones than the
        newest were drafted."""
        return last - min(last, self.max_depth - 1)

    def unroll(self, batch: UnrollBatch) -> Iterator[UnrolledStep]:
        hidden = self.heads[0].fuse(batch.taps)
        positions, has_next = batch.positions, batch.has_next
        for depth in range(batch.num_steps):
            if depth >= self.max_depth:
                # Nothing is drafted so deep.
                nothing = torch.zeros_like(hidden)
                yield UnrolledStep(hidden=nothing, valid=torch.zeros_like(has_next), offset=2)
                continue
            head = self.heads[depth]
            # the last columns get wrong ones, and nothing to predict
            embeds = head.embed(torch.roll(batch.input_ids, -1 - depth, dims=1))
            context = UnrollPass(batch.segments)
            step = head.step(embeds, hidden, positions, context)
            hidden = step.next_hidden
            drafted = pad(step.head_input[:, : hidden.shape[1] - depth], (0, 0, depth, 0))
            yield UnrolledStep(hidden=drafted, valid=has_next & (positions >= depth), offset=2)

    def draft(self, inputs: DraftInputs, sampler: DraftSampler) -> None:
        """Every module reads all positions of the rows that have a state, also where none drafts so
        deep."""
        unread = Unread.of(inputs, AppendedMtp.ahead)
        if not unread.rows:
            return
        plan = sampler.plan(unread.rows, self.max_depth)
        (positions, following, rows, counts, ends, *places), depths = plan.sent(
            inputs.tokens.device,
            unread.spread(unread.starts),
            unread.spread(unread.begins),
            unread.rows,
            unread.counts,
            [end - 1 for end in itertools.accumulate(unread.counts)],
            # where the rows of each depth are among all
            *([unread.rows.index(row) for row in alive] for alive in plan.alive),
        )
        tokens = inputs.tokens[following]
        tables = inputs.block_tables[rows]
        context = PagedPass(inputs.own_pool, tables, positions, counts)
        hidden = self.heads[0].fuse(inputs.taps)
        for depth, head in enumerate(self.heads):
            step = head.step(head.embed(tokens)[None], hidden[None], positions[None], context)
            hidden = step.next_hidden[0]
            newest = tokens[ends]
            if depth < len(depths):
                at = places[depth]
                states = step.head_input[0][ends[at]]
                logits = states @ head.head_weight().T
                newest = newest.clone()
                newest[at] = sampler.draw(
                    depths[depth].rows, depth, logits, positions[ends[at]] + 2 + depth
                )
            tokens = torch.roll(tokens, -1)
            tokens[ends] = newest  # of a row that drafts no more, whatever is there is read again
