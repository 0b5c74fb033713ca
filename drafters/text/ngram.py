"""Drafts by copying: the text that followed an earlier occurrence of the last few tokens. No
weights, no cache, one-hot q.

The longest matching n wins, then the earliest occurrence (as in vLLM): [1, 2, 3, 4, 1, 2, 3] with n
= 2, k = 3 gives [4, 1, 2].
"""

from __future__ import annotations

from abc import ABC, abstractmethod

import numpy as np
import torch

from draftsmith.drafters.interface import DraftInputs, Proposal
from draftsmith.drafters.weights import ReadBytes
from draftsmith.errors import UserError
from draftsmith.kernels.attention.pool import PagedPool


class CopiesText(ABC):
    """A drafter without weights and cache, whose drafts are pieces of texts."""

    taps: tuple[int, ...] = ()

    @abstractmethod
    def copied(self, inputs: DraftInputs) -> list[list[int]]:
        """At most `num_draft` tokens for each row."""

    def new_pool(
        self, num_blocks: int, block_size: int, device: torch.device, dtype: torch.dtype
    ) -> PagedPool | None:
        return None

    def propose(self, inputs: DraftInputs) -> Proposal:
        drafts = self.copied(inputs)
        width, device = int(inputs.num_draft.max()), inputs.tokens.device
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


class Ngram(CopiesText):
    """The whole text is searched, or the last `window` tokens of it.

    A round costs one comparison with every token of the text; the tokens themselves are read once.
    """

    family = "ngram"

    def __init__(self, *, min_n: int = 2, max_n: int = 4, window: int | None = None):
        if not 1 <= min_n <= max_n:
            raise UserError(f"n-gram lengths {min_n} to {max_n} are no range; give 1 <= min <= max")
        self.min_n, self.max_n, self.window = min_n, max_n, window
        self._texts: dict[str, GrowingText] = {}  # of requests that have not ended

    def copied(self, inputs: DraftInputs) -> list[list[int]]:
        names = inputs.request_ids or [""] * len(inputs.histories)
        rows = zip(names, inputs.histories, inputs.num_draft.tolist(), strict=True)
        return [self._continuation(name, history, k) for name, history, k in rows]

    def finished(self, request_id: str, tokens: list[int]) -> None:
        self._texts.pop(request_id, None)

    def _continuation(self, name: str, history: list[int], k: int) -> list[int]:
        if k == 0:
            return []
        own = self._texts.setdefault(name, GrowingText()) if name else GrowingText()
        text = own.read(history)[-(self.window or len(history)) :]
        begin = find(text, self.min_n, self.max_n)
        return [] if begin is None else text[begin : begin + k].tolist()


class GrowingText:
    """The tokens of a text that only grows, as an array."""

    def __init__(self) -> None:
        self._cells = np.empty(0, dtype=np.int32)
        self._length = 0

    def read(self, history: list[int]) -> np.ndarray:
        """[len(history)] int32; the part that was read before is not read again."""
        if len(history) > len(self._cells):
            cells = np.empty(2 * len(history), dtype=np.int32)
            cells[: self._length] = self._cells[: self._length]
            self._cells = cells
        self._cells[self._length : len(history)] = history[self._length :]
        self._length = len(history)
        return self._cells[: self._length]


def find(text: np.ndarray, min_n: int, max_n: int) -> int | None:
    """Start of the continuation of the longest repeated suffix of at most `max_n` tokens; None when
    none is `min_n` long."""
    best, alive = None, np.ones(len(text), dtype=bool)
    for n in range(1, min(max_n, len(text) - 1) + 1):
        # [L - n]: the last n tokens stand there as well.
        alive = alive[1:] & (text[:-n] == text[-n])
        first = int(alive.argmax())
        if not alive[first]:
            break
        if n >= min_n:
            best = first + n
    return best
