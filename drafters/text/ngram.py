"""Drafts by copying: the text that followed an earlier occurrence of the last few tokens. No
weights, no cache, one-hot q.

The longest matching n wins, then the earliest occurrence (as in vLLM): [1, 2, 3, 4, 1, 2, 3] with n
= 2, k = 3 gives [4, 1, 2].
"""

from __future__ import annotations

import numpy as np
import torch

from draftsmith.drafters.interface import DraftInputs, Proposal
from draftsmith.drafters.weights import ReadBytes
from draftsmith.errors import UserError
from draftsmith.kernels.attention.pool import PagedPool


class Ngram:
    """`window` bounds the cost: only that many of the last tokens are searched."""

    family = "ngram"
    taps: tuple[int, ...] = ()

    def __init__(self, *, min_n: int = 2, max_n: int = 4, window: int = 8192):
        if not 1 <= min_n <= max_n:
            raise UserError(f"n-gram lengths {min_n} to {max_n} are no range; give 1 <= min <= max")
        self.min_n, self.max_n, self.window = min_n, max_n, window

    def new_pool(
        self, num_blocks: int, block_size: int, device: torch.device, dtype: torch.dtype
    ) -> PagedPool | None:
        return None

    def propose(self, inputs: DraftInputs) -> Proposal:
        drafts = [
            self._continuation(history, k)
            for history, k in zip(inputs.histories, inputs.num_draft.tolist())
        ]
        width = int(inputs.num_draft.max())
        device = inputs.tokens.device
        tokens = torch.tensor(
            [draft + [-1] * (width - len(draft)) for draft in drafts],
            dtype=torch.int64,
            device=device,
        )
        lengths = torch.tensor([len(draft) for draft in drafts], device=device)
        return Proposal(tokens=tokens.view(len(drafts), width), lengths=lengths, logits=None)

    def cached_after(self, last: int, drafted: int, accepted: int) -> int:
        return last + 1

    def read_bytes(self) -> ReadBytes:
        return ReadBytes(0, 0)

    def _continuation(self, history: list[int], k: int) -> list[int]:
        if k == 0:
            return []
        text = np.asarray(history[-self.window :])
        begin = find(text, self.min_n, self.max_n)
        return [] if begin is None else text[begin : begin + k].tolist()


def find(text: np.ndarray, min_n: int, max_n: int) -> int | None:
    """Start of the continuation of the longest repeated suffix of at most `max_n` tokens; None when
    none is `min_n` long."""
    ends = np.arange(len(text) - 1)  # candidates for the last token of an earlier occurrence
    best: np.ndarray = ends[:0]
    for n in range(1, min(max_n, len(text) - 1) + 1):
        ends = ends[ends >= n - 1]
        ends = ends[text[ends - n + 1] == text[-n]]
        if len(ends) == 0:
            break
        if n >= min_n:
            best = ends
    return int(best[0]) + 1 if len(best) else None
