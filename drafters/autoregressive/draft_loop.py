"""A round of a drafter of chains: what its loop draws, and the distributions that it drew from."""

from __future__ import annotations

from abc import ABC, abstractmethod

import torch

from draftsmith.drafters.autoregressive.draft_sampler import DraftSampler
from draftsmith.drafters.interface import DraftInputs, Proposal


class DraftLoop(ABC):
    vocab_size: int  # of the target

    @property
    @abstractmethod
    def vocab_map(self) -> torch.Tensor | None:
        """[Vd] the target's id of each draft id; None where they are the same."""

    def refresh(self) -> None:
        """Take over weights that a swap has written in place."""
        return

    @torch.no_grad()
    def propose(self, inputs: DraftInputs) -> Proposal:
        self.refresh()
        sampler = DraftSampler(inputs, vocab_size=self.vocab_size, vocab_map=self.vocab_map)
        self.draft(inputs, sampler)
        return sampler.proposal()

    @abstractmethod
    def draft(self, inputs: DraftInputs, sampler: DraftSampler) -> None:
        """Draft as many tokens as each row may, into `sampler`."""
