"""How often each token has occurred in a request: counted once as it is committed, on the device that the logits are on."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch


class Occurrences(NamedTuple):
    output: torch.Tensor  # [V] float32: how often in the output
    prompt: torch.Tensor  # [V] bool: whether in the prompt


class TokenCounts:
    """V-sized, so that penalties are a few passes over the rows and no loop over the text."""

    def __init__(self, num_prompt: int, vocab_size: int, device: torch.device):
        self.num_prompt = self._counted = num_prompt
        self._occurrences = Occurrences(
            torch.zeros(vocab_size, dtype=torch.float32, device=device),
            torch.zeros(vocab_size, dtype=torch.bool, device=device),
        )
        self._knows_prompt = False

    def of(self, tokens: Sequence[int]) -> Occurrences:
        """In `tokens`, the prompt and the output, which only ever grow."""
        output, prompt = self._occurrences
        if not self._knows_prompt:
            prompt[torch.tensor(tokens[: self.num_prompt], device=prompt.device)] = True
            self._knows_prompt = True
        fresh = tokens[self._counted :]
        if fresh:
            at = torch.tensor(fresh, device=output.device)
            output.index_add_(0, at, torch.ones(len(fresh), dtype=output.dtype, device=output.device))
            self._counted = len(tokens)
        return self._occurrences
