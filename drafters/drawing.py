"""Draws draft tokens depth by depth and keeps the law each was drawn from (law 2: q is what was sampled)."""

from __future__ import annotations

import torch

from draftsmith.drafters.interface import Adjust, DraftInputs, Proposal
from draftsmith.kernels.filters import process
from draftsmith.kernels.randomness import Purpose, sample


class Drawing:
    """`vocab_map` [Vd] holds the target's id of each draft id, None for the same ids; laws are kept over the target's ids."""

    def __init__(self, inputs: DraftInputs, *, vocab_size: int, vocab_map: torch.Tensor | None = None):
        self.inputs = inputs
        self.vocab_map = vocab_map
        self.budgets: list[int] = inputs.num_draft.tolist()
        size, self.depth = len(self.budgets), max(self.budgets)
        device = inputs.num_draft.device
        # A greedy draft is the argmax, and its law is one-hot: a batch of them needs no laws at all.
        self.greedy = bool((inputs.sampling.temperature == 0).all())
        self._best: list[torch.Tensor] = []  # the largest logits of greedy draws; looked at once, at the end
        self.tokens = torch.full((size, self.depth), -1, dtype=torch.int64, device=device)
        self.shape = (size, self.depth, vocab_size)
        self.logits = None if self.greedy else self._no_mass()
        self.lengths = torch.zeros(size, dtype=torch.int64, device=device)

    def draw(self, rows: torch.Tensor, depth: int, logits: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        """Raw draft logits [R, Vd] of `rows` [R] -> target ids [R], the tokens of the absolute `positions` [R]."""
        if self.inputs.adjust is not None:
            prefixes = self.tokens[rows, :depth].tolist()
            logits = adjusted(self.inputs.adjust, logits, rows, prefixes, self.shape[2], self.vocab_map)
        whole = len(rows) == len(self.lengths)
        if self.logits is None:
            best = logits.max(dim=-1)  # the first of equal logits
            self._best.append(best.values)
            tokens = best.indices
        else:
            processed = process(logits, self.inputs.sampling if whole else self.inputs.sampling.select(rows))
            # A law without mass (NaN weights) draws -1; token 0 at -inf says the same and can be embedded.
            tokens = sample(processed, self.inputs.seeds[rows], positions, Purpose.DRAFT).clamp(min=0)
            if self.vocab_map is None:
                self.logits[rows, depth] = processed
            else:
                self.logits[rows[:, None], depth, self.vocab_map[None, :]] = processed
        if self.vocab_map is not None:
            tokens = self.vocab_map[tokens]
        if whole:
            self.tokens[:, depth] = tokens
            self.lengths.fill_(depth + 1)
        else:
            self.tokens[rows, depth] = tokens
            self.lengths[rows] = depth + 1
        return tokens

    def proposal(self) -> Proposal:
        sound = not self._best or bool(torch.isfinite(torch.cat(self._best)).all())
        return Proposal(tokens=self.tokens, lengths=self.lengths, logits=self.logits if sound else self._no_mass())

    def _no_mass(self) -> torch.Tensor:
        # The type is named: a version being loaded on another thread changes torch's default for a while.
        return torch.full(self.shape, -torch.inf, dtype=torch.float32, device=self.tokens.device)


def adjusted(
    adjust: Adjust,
    logits: torch.Tensor,
    rows: torch.Tensor,
    prefixes: list[list[int]],
    vocab_size: int,
    vocab_map: torch.Tensor | None,
) -> torch.Tensor:
    """What the requests `rows` [R] ask of their laws, still over the draft's ids: every row draws as it would alone. [R, Vd]."""
    full = logits
    if vocab_map is not None:
        full = torch.full((len(rows), vocab_size), -torch.inf, dtype=logits.dtype, device=logits.device)
        full[:, vocab_map] = logits
    changed = adjust(full, rows, prefixes)
    if vocab_map is not None:
        changed = changed[:, vocab_map]
    # A draft that knows no token that may come has not failed: what it draws instead is rejected.
    possible = (changed > -torch.inf).any(dim=-1, keepdim=True)
    return torch.where(possible, changed, logits)
