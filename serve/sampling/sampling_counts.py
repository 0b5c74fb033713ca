"""Which tokens have occurred in a request and how often: each counted once, as it is committed."""

from __future__ import annotations

from collections.abc import Sequence

import torch


class TokenCounts:
    """U distinct tokens in the order in which they came; penalties look at these, never at the whole vocabulary."""

    def __init__(self, num_prompt: int, device: torch.device):
        self.num_prompt = num_prompt
        self.slots: dict[int, int] = {}  # place of each token in the tensors
        self.ids = torch.zeros(0, dtype=torch.int64, device=device)  # [U]
        self.output = torch.zeros(0, dtype=torch.float32, device=device)  # [U] how often in the output
        self.prompt = torch.zeros(0, dtype=torch.bool, device=device)  # [U] whether in the prompt
        self._counted = 0

    def follow(self, tokens: Sequence[int]) -> None:
        """`tokens`, the prompt and the output, have grown."""
        begin, self._counted = self._counted, len(tokens)
        new = [token for token in dict.fromkeys(tokens[begin:]) if token not in self.slots]
        if new:
            self.slots.update(zip(new, range(len(self.slots), len(self.slots) + len(new))))
            self.ids = torch.cat([self.ids, torch.tensor(new, device=self.ids.device)])
            self.output = torch.cat([self.output, self.output.new_zeros(len(new))])
            self.prompt = torch.cat([self.prompt, self.prompt.new_zeros(len(new))])
        if begin < self.num_prompt:
            self.prompt[self._places(tokens[begin : self.num_prompt])] = True
        written = tokens[max(begin, self.num_prompt) :]
        if written:
            places = self._places(written)
            self.output.index_add_(0, places, torch.ones_like(places, dtype=self.output.dtype))

    def _places(self, tokens: Sequence[int]) -> torch.Tensor:
        return torch.tensor([self.slots[token] for token in tokens], device=self.ids.device)
