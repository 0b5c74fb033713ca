"""Suffix decoding (arXiv 2411.04975): drafts the most frequent continuation of what the text ends
with, as seen in this request and in those that have finished. No weights, no cache, one-hot q.

A context of L matching tokens earns a draft of at most L * max_spec_factor + max_spec_offset
tokens. The draft follows the most frequent next token while the estimated probability of having
come so far is at least min_token_prob; its score is the sum of those probabilities, the number of
tokens it expects to have accepted. The best score wins, and of equals the longer context.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import torch

from draftsmith.config import check_limits
from draftsmith.drafters.interface import DraftInputs, Proposal
from draftsmith.drafters.options import SuffixOptions
from draftsmith.drafters.text.suffix_index import ORDERS, SEPARATOR, SuffixIndex
from draftsmith.drafters.weights import ReadBytes
from draftsmith.kernels.attention.pool import PagedPool

# The part of a request's own text that is searched: about 9 MB of index where a text is as long.
WINDOW = 131_072
# Scores that differ by no more are equal: they are sums of rounded products.
SAME_SCORE = 1e-12


class SuffixDraft(NamedTuple):
    tokens: list[int]
    score: float  # tokens expected to be accepted


class Suffix:
    """Suffix decoding. Text shared between requests is bounded by `max_cached_requests` and
    `max_cached_tokens`; the oldest goes first."""

    family = "suffix"
    taps: tuple[int, ...] = ()

    def __init__(self, options: SuffixOptions | None = None):
        self.options = options or SuffixOptions()
        check_limits(self.options, "suffix_")
        self.shared = SuffixIndex(
            self.options.max_cached_tokens, max_texts=max(1, self.options.max_cached_requests)
        )
        self._own: dict[str, OwnText] = {}

    def new_pool(
        self, num_blocks: int, block_size: int, device: torch.device, dtype: torch.dtype
    ) -> PagedPool | None:
        return None

    def propose(self, inputs: DraftInputs) -> Proposal:
        drafts = [draft.tokens for draft in self.drafts(inputs)]
        width, device = int(inputs.num_draft.max()), inputs.tokens.device
        tokens = torch.tensor(
            [draft + [-1] * (width - len(draft)) for draft in drafts],
            dtype=torch.int64,
            device=device,
        )
        lengths = torch.tensor([len(draft) for draft in drafts], device=device)
        return Proposal(tokens=tokens.view(len(drafts), width), lengths=lengths, logits=None)

    def drafts(self, inputs: DraftInputs) -> list[SuffixDraft]:
        names = inputs.request_ids or [""] * len(inputs.histories)
        shares = inputs.shares or [True] * len(inputs.histories)
        rows = zip(names, inputs.histories, inputs.num_draft.tolist(), shares, strict=True)
        return [self._draft(name, history, k, shared) for name, history, k, shared in rows]

    def cached_after(self, last: int, drafted: int, accepted: int) -> int:
        return last + 1

    def read_bytes(self) -> ReadBytes:
        return ReadBytes(0, 0)

    def finished(self, request_id: str, tokens: list[int]) -> None:
        self._own.pop(request_id, None)
        if tokens and self.options.max_cached_requests > 0:
            self.shared.begin_text()
            self.shared.extend(tokens)

    def _draft(self, name: str, history: list[int], k: int, shared: bool) -> SuffixDraft:
        if k == 0:
            return SuffixDraft([], 0.0)
        own = self._own.setdefault(name, OwnText()) if name else OwnText()
        own.read(history)
        context = history[-self.options.max_tree_depth :]
        draft = self._best(own.index, context, k)
        if shared and draft.score < k and self.shared.num_texts > 0:
            draft = better(draft, self._best(self.shared, context, k))
        return draft

    def _best(self, index: SuffixIndex, context: Sequence[int], k: int) -> SuffixDraft:
        best = SuffixDraft([], 0.0)
        longest = len(context)
        for order in reversed(range(len(ORDERS))):
            # No draft from contexts up to `longest` can beat what was found.
            if best.score >= self._budget(longest, k):
                break
            found = index.occurrences(context, order, k)
            for length in sorted({*found.lengths[found.lengths <= longest].tolist()}, reverse=True):
                budget = self._budget(length, k)
                if best.score >= budget:
                    break
                followed = found.continuations[found.lengths >= length]
                draft = most_frequent(followed, budget, self.options.min_token_prob)
                best = better(best, draft)
            longest = min(longest, ORDERS[order] - 1)
        return best

    def _budget(self, length: int, k: int) -> int:
        return max(
            0, min(k, int(length * self.options.max_spec_factor + self.options.max_spec_offset))
        )


class OwnText:
    """The index of one request's text so far."""

    def __init__(self) -> None:
        self.index = SuffixIndex(0)
        self.num_read = 0

    def read(self, history: list[int]) -> None:
        """Read the new part of a text."""
        if self.num_read == 0 or self.index.capacity < min(len(history), WINDOW):
            self.index = SuffixIndex(min(2 * len(history), WINDOW))
            self.index.begin_text()
            self.num_read = 0
        self.index.extend(history[self.num_read :])
        self.num_read = len(history)


def better(first: SuffixDraft, second: SuffixDraft) -> SuffixDraft:
    """The draft of the higher score, of equal scores the first."""
    return second if second.score > first.score + SAME_SCORE else first


def most_frequent(continuations: np.ndarray, budget: int, min_prob: float) -> SuffixDraft:
    """Follows the most frequent next token (of equals, the one seen last) of continuations [C, K],
    newest first."""
    rows: list[list[int]] = continuations[:, :budget].tolist()
    tokens: list[int] = []
    score, prob = 0.0, 1.0
    for depth in range(budget):
        counts = Counter(row[depth] for row in rows)
        ended = counts.pop(SEPARATOR, 0)
        if not counts:
            break
        # Counter keeps the order of the first sight, and max the first of equals.
        token, count = max(counts.items(), key=lambda item: item[1])
        prob *= count / (counts.total() + ended)
        if prob < min_prob:
            break
        tokens.append(token)
        score += prob
        rows = [row for row in rows if row[depth] == token]
    return SuffixDraft(tokens, score)
