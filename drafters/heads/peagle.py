"""P-EAGLE (arXiv 2602.01469): an EAGLE-3 head that drafts all k tokens in one pass.

    slot 0      = EAGLE-3's input at the last true state: (embedding of the newest token,
    fc(cat(taps)))
    slot i > 0  = (embedding of the mask token, fc(mask_hidden)) at the position after; it sees true
    states and slots before it
    logits of x_{n+1+i} = lm_head(norm(state of slot i))

`mask_hidden` stands for the taps of a position that the target has not read. Drafts do not see each
other, so q of a chain is a product, and there is nothing for a tree to branch on.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import nn

from draftsmith.drafters.autoregressive.call_graphs import CallLoop
from draftsmith.drafters.autoregressive.draft_sampler import DraftSampler, DraftStep
from draftsmith.drafters.autoregressive.padded_round import PaddedRound, RoundShape
from draftsmith.drafters.autoregressive.state import Unread
from draftsmith.drafters.blocks.block_unroll import BlockPass
from draftsmith.drafters.heads.eagle3 import Eagle3
from draftsmith.drafters.init_from_target import checked_mask_token, probed
from draftsmith.drafters.interface import DraftInputs, UnrollBatch, UnrolledStep
from draftsmith.drafters.layouts.folder import DraftFolder, flattened
from draftsmith.drafters.options import PeagleOptions
from draftsmith.drafters.target.target import Target
from draftsmith.drafters.weights import ReadBytes, read_config
from draftsmith.errors import UserError
from draftsmith.kernels.attention.paged import PagedPass
from draftsmith.kernels.attention.pool import PagedPool

ARCHITECTURES = (
    "PEagleDraftModel",
    "PeagleLlamaForCausalLM",
    "PeagleQwen3ForCausalLM",
    "PEagleSpeculator",
)
# Keys under which trainers name the token of the slots to be drafted.
MASK_KEYS = ("mask_token_id", "pard_token", "ptd_token_id")


class Peagle(CallLoop, Eagle3):
    family = "p-eagle"
    ends_chains = False  # all tokens come in one pass
    propose_tree = None  # not a drafter that grows trees

    def __init__(self, *args: Any, mask_token: int | None = None, **shape: Any):
        super().__init__(*args, **shape)
        self.mask_token = checked_mask_token(self._target, mask_token)
        self.mask_hidden = nn.Parameter(
            torch.zeros(1, self.fc.in_features, device=self.fc.weight.device)
        )

    @classmethod
    def matches(cls, draft: DraftFolder, target: Target | None = None) -> bool:
        return draft.architecture in ARCHITECTURES or (
            super().matches(draft, target) and drafts_in_parallel(draft.config)
        )

    @classmethod
    def new(  # type: ignore[override]
        cls, options: PeagleOptions, target: Target, token_counts: torch.Tensor | None
    ) -> Peagle:
        drafter = super().new(options, target, token_counts)
        drafter.mask_token = checked_mask_token(target, options.mask_token)
        # Taps as they are on average: of random ones the head makes worse than a uniform guess.
        drafter.mask_hidden.data.copy_(probed(target, drafter.taps).mean(dim=0, keepdim=True))
        return drafter

    def unroll(self, batch: UnrollBatch) -> Iterator[UnrolledStep]:
        """One pass: the slots at every column t draft t + 2, t + 3, ... after it."""
        ids, (rows, length), slots = batch.input_ids, batch.input_ids.shape, batch.num_steps
        places = batch.positions
        # the last column gets a wrong one, and nothing to predict
        following = torch.roll(ids, -1, dims=1)
        # Masks of blocks before this column draft nothing that counts; their first slots are
        # context.
        first = max(0, batch.first - 1 - slots)
        tokens = torch.full((rows, length - first, slots), self.mask_token, device=ids.device)
        tokens[:, :, 0] = following[:, first:]
        tokens = torch.cat([following[:, :first], tokens.flatten(1)], dim=1)
        fused = self.fuse(batch.taps)
        hidden = self.fuse(self.mask_hidden).expand(rows, length - first, slots, -1).clone()
        hidden[:, :, 0] = fused[:, first:]
        hidden = torch.cat([fused[:, :first], hidden.flatten(1, 2)], dim=1)
        positions = (places[:, first:, None] + torch.arange(slots, device=ids.device)).flatten(1)
        positions = torch.cat([places[:, :first], positions], dim=1)
        # Masks of one block are no context of another.
        context = BlockPass(None, slots=slots, causal=True, segments=batch.segments, first=first)
        states = (
            self.step(self.embed(tokens), hidden, positions, context)
            .head_input[:, first:]
            .unflatten(1, (-1, slots))
        )
        has_next = batch.has_next  # column t reads the token at t + 1
        for depth in range(slots):
            # The block that drafts the token at t + 2 at this depth stands at t - depth.
            drafted = nn.functional.pad(states[:, :, depth], (0, 0, first + depth, 0))[:, :length]
            yield UnrolledStep(hidden=drafted, valid=has_next & (places >= depth), offset=2)

    def draft_call(self, inputs: DraftInputs, sampler: DraftSampler) -> None:
        """True states and masks of all rows are read in one pass."""
        unread, budgets = Unread.of(inputs, self.ahead), sampler.budgets
        if not unread.rows:
            return
        # The slots of each row: its new true states, then k - 1 masks.
        masks_of = [max(0, budgets[row] - 1) for row in unread.rows]
        slots = unread._replace(counts=[sum(pair) for pair in zip(unread.counts, masks_of)])
        # 0 at a row's last true state, beyond at its masks, below at earlier states
        depth_of = slots.spread([1 - count for count in unread.counts])
        last = len(inputs.tokens) - 1  # of a mask, any token will do
        rows = [at for at, row in enumerate(unread.rows) if budgets[row] > 0]
        ends = list(itertools.accumulate(slots.counts))
        # A row draws from its last true state and the masks after it.
        drawn = [list(range(ends[at] - budgets[unread.rows[at]], ends[at])) for at in rows]
        plan = sampler.plan([unread.rows[at] for at in rows])
        parts, depths = plan.sent(
            inputs.tokens.device,
            unread.rows,
            slots.counts,
            slots.spread(slots.starts),
            [min(at, last) for at in slots.spread(slots.begins)],
            [at for at, depth in enumerate(depth_of) if depth > 0],
            [at for at, depth in enumerate(depth_of) if depth <= 0],
            [at for own in drawn for at in own],
            [end - len(own) for end, own in zip(itertools.accumulate(map(len, drawn)), drawn)],
            [unread.starts[at] + unread.counts[at] for at in rows],
        )
        *read, drafting, begins, newest = parts
        logits = self.draft_logits(self._read(inputs, read)[drafting])
        for depth, (chosen, kept, _) in enumerate(depths):
            if kept is not None:
                begins, newest = begins[kept], newest[kept]
            sampler.draw(chosen, depth, logits[begins + depth], newest + 1 + depth)

    def draft_padded(
        self, padded: PaddedRound, shape: RoundShape, pool: PagedPool | None
    ) -> list[DraftStep]:
        assert pool is not None
        # The true states of a row, then its masks; the last of them again where it has fewer.
        most = padded.last + (padded.budgets - 1).clamp(min=0)
        size = shape.width + shape.depths - 1
        index = torch.arange(size, device=most.device).minimum(most[:, None])
        slots = index.minimum(padded.last[:, None])
        masked, taps = index > slots, padded.taps(slots)
        assert taps is not None
        tokens = torch.where(masked, self.mask_token, padded.tokens(slots))
        hidden = torch.where(masked[..., None], self.fuse(self.mask_hidden), self.fused(taps))
        positions = (padded.starts[:, None] + index).flatten()
        lengths = torch.full_like(most, size)
        context = PagedPass(pool, padded.tables, positions, lengths)
        step = self.read_ragged(self.embed(tokens.flatten()), hidden.flatten(0, 1), context)
        states = step.head_input.unflatten(0, (-1, size))
        rows, newest = torch.arange(len(most), device=most.device), padded.starts + padded.last + 1
        return [
            padded.draw(
                self.draft_logits(states[rows, padded.last + depth]),
                newest + 1 + depth,
                self.vocab_map,
            )
            for depth in range(shape.depths)
        ]

    def read_bytes(self) -> ReadBytes:
        return ReadBytes(proposal=super().read_bytes().token, token=0)

    def _read(self, inputs: DraftInputs, parts: Sequence[torch.Tensor]) -> torch.Tensor:
        """States that the head multiplies [T, H]. `parts`: rows and their numbers of slots [R],
        positions and embedded tokens of the slots [T], which of these are masks, and which true
        states."""
        rows, counts, position, token, masks, true = parts
        ids = inputs.tokens[token].index_fill(0, masks, self.mask_token)
        hidden = (
            self.fuse(self.mask_hidden)
            .expand(len(ids), -1)
            .index_copy(0, true, self.fused(inputs.taps))
        )
        context = PagedPass(inputs.own_pool, inputs.block_tables[rows], position, counts)
        return self.read_ragged(self.embed(ids), hidden, context).head_input

    def portable_config(self) -> dict[str, Any]:
        """EAGLE-3's config with the keys of parallel drafting. vLLM takes `parallel_drafting` from
        its own options instead."""
        return super().portable_config() | {
            "parallel_drafting": True,
            "mask_token_id": self.mask_token,
        }

    @classmethod
    def load(cls, folder: Path, target: Target) -> Peagle:
        drafter = super().load(folder, target)
        values = flattened(read_config(folder))
        named = [values[key] for key in MASK_KEYS if values.get(key) is not None]
        if not named:
            raise UserError(
                f"draft {str(folder)!r} does not say its 'mask_token_id'; restore config.json"
            )
        drafter.mask_token = checked_mask_token(target, named[0])
        return drafter


def drafts_in_parallel(values: Mapping[str, Any]) -> bool:
    """True for an EAGLE-3 `config.json` of a parallel drafter; trainers mark it by one of these
    keys alone."""
    return bool(values.get("parallel_drafting")) or any(
        values.get(key) is not None for key in MASK_KEYS
    )
