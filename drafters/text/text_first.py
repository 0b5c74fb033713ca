"""Suffix decoding in front of a trained draft: text that repeats itself is copied, the model drafts
the rest.

The drafter of a row is chosen from committed text alone, before anything is drawn (invariant 4):
the one of which more tokens are expected to be kept, by what was kept of each lately.
The model reads every true state all the same, so that it can go on at any time.
"""

from __future__ import annotations

from dataclasses import replace
from typing import NamedTuple

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

FADE = 0.05  # weight of one more draft in the running means


class _Asked(NamedTuple):
    length: int  # of the text that was drafted behind
    k: int
    expected: float  # tokens to be kept, of the model all k
    by_text: bool


class TextFirst(ForwardCapturable, Capturable):
    def __init__(self, model: ServingDrafter, text: Suffix):
        self.model, self.text = model, text
        self.family, self.taps = model.family, model.taps
        self.model_share = 0.8  # of the tokens asked of the model that were kept
        self.text_share = 1.0  # of the tokens that text expected to be kept
        self._asked: dict[str, _Asked] = {}  # by request, of its last round

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
        self._learn(inputs)
        taken = [
            k > 0 and self.text_share * draft.score >= self.model_share * k
            for draft, k in zip(drafts, counts, strict=True)
        ]
        shares = inputs.shares or [True] * len(counts)
        rows = zip(inputs.request_ids, inputs.histories, drafts, counts, taken, shares)
        # What was kept of a request that shares nothing may decide nothing in another one.
        self._asked |= {
            name: _Asked(len(history), k, draft.score if by_text else float(k), by_text)
            for name, history, draft, k, by_text, shared in rows
            if k > 0 and shared
        }
        if not any(taken):
            return self.model.propose(inputs)
        is_taken = torch.tensor(taken)
        modelled = self.model.propose(
            replace(inputs, num_draft=inputs.num_draft.masked_fill(is_taken, 0))
        )
        return joined(
            modelled, {row: draft for row, draft in enumerate(drafts) if taken[row]}, max(counts)
        )

    def _learn(self, inputs: DraftInputs) -> None:
        """Takes what was kept since the last round into the means. A round that committed nothing,
        or others between that drafted nothing, say nothing of it."""
        for name, history in zip(inputs.request_ids, inputs.histories):
            asked = self._asked.pop(name, None)
            if asked is None or not 0 <= (kept := len(history) - asked.length - 1) <= asked.k:
                continue
            share = min(1.0, kept / asked.expected)
            if asked.by_text:
                self.text_share += FADE * (share - self.text_share)
            else:
                self.model_share += FADE * (share - self.model_share)

    def cached_after(self, last: int, drafted: int, accepted: int) -> int:
        """Tokens copied from text were never read by the model."""
        return min(self.model.cached_after(last, drafted, accepted), last + 1)

    def finished(self, request_id: str, tokens: list[int]) -> None:
        self._asked.pop(request_id, None)
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
