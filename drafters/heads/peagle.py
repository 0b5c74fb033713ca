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

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import nn

from draftsmith.drafters.autoregressive.call_graphs import CallLoop
from draftsmith.drafters.autoregressive.draft_sampler import DraftSampler, DraftStep
from draftsmith.drafters.autoregressive.padded_round import PaddedRound, RoundShape
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
        slots = Slots.of(inputs)
        if len(slots.row) == 0:
            return
        # A row draws from its last true state and the masks after it.
        rows = slots.rows[inputs.num_draft[slots.rows] > 0]
        plan = sampler.plan(rows.tolist())
        drawn = ((inputs.num_draft[slots.row] > 0) & (slots.depth >= 0)).nonzero()[:, 0]
        budgets, newest = inputs.num_draft[rows], inputs.starts[rows] + inputs.lengths[rows] - 1
        columns = (*slots.columns(), drawn, budgets.cumsum(0) - budgets, newest)
        (*parts, drafting, begins, newest), depths = plan.sent(inputs.tokens.device, *columns)
        logits = self.draft_logits(self._read(inputs, parts)[drafting])
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
        """True states and masks of all rows in one pass -> what the head multiplies [T, H]; `parts`
        are the `columns` of its slots, on the device."""
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
        values = flattened(read_config(Path(folder)))
        named = [values[key] for key in MASK_KEYS if values.get(key) is not None]
        if not named:
            raise UserError(
                f"draft {str(folder)!r} does not say its 'mask_token_id'; restore config.json"
            )
        drafter.mask_token = checked_mask_token(target, named[0])
        return drafter


class Slots(NamedTuple):
    """Slots of one pass, on the host: the new true states of every row that has any, and k - 1
    masks. T slots, R rows."""

    rows: torch.Tensor  # [R] of the proposal
    counts: torch.Tensor  # [R] slots of each
    row: torch.Tensor  # [T]
    position: torch.Tensor  # [T]
    # [T] index into the inputs' tokens of the one that is embedded; of a mask nothing that means
    # something
    token: torch.Tensor
    # [T] 0 at a row's last true state, beyond at its masks, below at earlier states
    depth: torch.Tensor

    def columns(self) -> tuple[torch.Tensor, ...]:
        """Numbers for the device, the places of masks and of true states among them."""
        masked = self.depth > 0
        places = (masked.nonzero()[:, 0], (~masked).nonzero()[:, 0])
        return (self.rows, self.counts, self.position, self.token, *places)

    @classmethod
    def of(cls, inputs: DraftInputs) -> Slots:
        rows = (inputs.lengths > 1).nonzero()[:, 0]  # the last token of each row has no state yet
        true = inputs.lengths[rows] - 1
        counts = true + (inputs.num_draft[rows] - 1).clamp(min=0)
        which = torch.repeat_interleave(counts)
        offset = torch.arange(len(which), device=which.device) - (counts.cumsum(0) - counts)[which]
        row = rows[which]
        ends = inputs.lengths.cumsum(0)[row]
        token = (ends - inputs.lengths[row] + 1 + offset).minimum(ends - 1)
        return cls(
            rows, counts, row, inputs.starts[row] + offset, token, offset - (true - 1)[which]
        )


def drafts_in_parallel(values: Mapping[str, Any]) -> bool:
    """True for an EAGLE-3 `config.json` of a parallel drafter; trainers mark it by one of these
    keys alone."""
    return bool(values.get("parallel_drafting")) or any(
        values.get(key) is not None for key in MASK_KEYS
    )
