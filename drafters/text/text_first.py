"""Suffix decoding in front of a trained draft: text that repeats itself is copied, the model drafts
the rest.

The drafter of a row is chosen from committed text alone, before anything is drawn (invariant 4).
The model reads every true state all the same, so that it can go on at any time.
"""

from __future__ import annotations

from dataclasses import replace

import torch

from draftsmith.drafters.interface import (
    Capturable,
    DraftInputs,
    EndsChains,
    ForwardCapturable,
    Proposal,
    ServingDrafter,
    draft_positions,
)
from draftsmith.drafters.text.suffix import Suffix, SuffixDraft
from draftsmith.kernels.attention.pool import PagedPool
from draftsmith.kernels.cuda_graphs import GraphRoom


class TextFirst(ForwardCapturable, Capturable):
    """`share`: text drafts a row where it expects at least this share of k tokens to be
    accepted."""

    def __init__(self, model: ServingDrafter, text: Suffix, *, share: float = 0.8):
        self.model, self.text, self.share = model, text, share
        self.family, self.taps = model.family, model.taps

    @property
    def ends_chains(self) -> bool:
        return isinstance(self.model, EndsChains) and self.model.ends_chains

    @property
    def max_positions(self) -> int | None:
        return draft_positions(self.model)

    def capture_forward(self) -> None:
        if isinstance(self.model, ForwardCapturable):
            self.model.capture_forward()

    def capture(self, room: GraphRoom) -> None:
        if isinstance(self.model, Capturable):
            self.model.capture(room)

    def new_pool(
        self, num_blocks: int, block_size: int, device: torch.device, dtype: torch.dtype
    ) -> PagedPool | None:
        return self.model.new_pool(num_blocks, block_size, device, dtype)

    def propose(self, inputs: DraftInputs) -> Proposal:
        counts: list[int] = inputs.num_draft.tolist()
        drafts = self.text.drafts(inputs)
        taken = [
            k > 0 and draft.score >= self.share * k for draft, k in zip(drafts, counts, strict=True)
        ]
        if not any(taken):
            return self.model.propose(inputs)
        is_taken = torch.tensor(taken)
        modelled = self.model.propose(
            replace(inputs, num_draft=inputs.num_draft.masked_fill(is_taken, 0))
        )
        return joined(
            modelled, {row: draft for row, draft in enumerate(drafts) if taken[row]}, max(counts)
        )

    def cached_after(self, last: int, drafted: int, accepted: int) -> int:
        """Tokens copied from text were never read by the model."""
        return min(self.model.cached_after(last, drafted, accepted), last + 1)

    def finished(self, request_id: str, tokens: list[int]) -> None:
        self.text.finished(request_id, tokens)


def joined(modelled: Proposal, texts: dict[int, SuffixDraft], width: int) -> Proposal:
    """The model's proposal with the rows of `texts` put in; their distribution is one-hot."""
    missing = width - modelled.tokens.shape[1]
    tokens = torch.nn.functional.pad(modelled.tokens, (0, missing), value=-1)
    lengths, logits = modelled.lengths.clone(), modelled.logits
    if logits is not None:
        logits = torch.nn.functional.pad(logits, (0, 0, 0, missing), value=-torch.inf).clone()
    for row, draft in texts.items():
        lengths[row] = len(draft.tokens)
        tokens[row, : len(draft.tokens)] = torch.tensor(draft.tokens, device=tokens.device)
        if logits is not None:
            logits[row] = -torch.inf
            logits[row, torch.arange(len(draft.tokens)), draft.tokens] = 0.0
    has_mass = None
    if modelled.has_mass is not None:
        has_mass = torch.nn.functional.pad(modelled.has_mass, (0, missing), value=True)
    return Proposal(
        tokens=tokens, lengths=lengths, logits=logits, has_mass=has_mass, copied=frozenset(texts)
    )
