"""Shapes of ragged passes that are worth a CUDA graph of their own: few that hold every round."""

from __future__ import annotations

import bisect
from collections.abc import Iterator
from typing import NamedTuple

from draftsmith.kernels.cuda_graphs import sizes_up_to


class Shape(NamedTuple):
    num_rows: int
    num_tokens: int

    def holds(self, num_rows: int, num_tokens: int) -> bool:
        """True where a pass fits, with a row for tokens that are left over."""
        if num_tokens < self.num_tokens:
            return num_rows < self.num_rows
        return num_tokens == self.num_tokens and num_rows <= self.num_rows


class Shapes:
    """At most two for each number of tokens: one for rounds in which all rows draft as many tokens
    as they may, and one for any other. Rows are no more than are needed, since attention cuts
    contexts by their number.

    Args:
        per_row: most tokens of a row: the one that is due, and those drafted.
        most_tokens: of a pass.
    """

    def __init__(self, *, max_batch: int, per_row: int, most_tokens: int):
        self._tokens = token_buckets(most_tokens)
        self._by_tokens = {
            tokens: sorted(
                {
                    Shape(min(rows, max_batch + 1), tokens)
                    for rows in (-(-tokens // per_row), tokens)
                }
            )
            for tokens in self._tokens
        }
        # The fewest rows need the first of the two if any do, the most the last.
        met = {
            self.of(num_rows, num_tokens)
            for num_tokens in range(1, most_tokens + 1)
            for num_rows in (1, min(num_tokens, max_batch))
        }
        self._all = sorted(
            (shape for shape in met if shape is not None),
            key=lambda shape: (shape.num_tokens, shape.num_rows),
            reverse=True,
        )
        self.most_rows = max(shape.num_rows for shape in self._all)
        self.most_tokens = self._all[0].num_tokens

    def __iter__(self) -> Iterator[Shape]:
        """Largest first, so that each graph finds the memory of the one before."""
        return iter(self._all)

    def __len__(self) -> int:
        return len(self._all)

    def of(self, num_rows: int, num_tokens: int) -> Shape | None:
        """The smallest that holds a pass; None: it is too large for any."""
        at = bisect.bisect_left(self._tokens, num_tokens)
        if at == len(self._tokens):
            return None
        fitting = (
            shape
            for shape in self._by_tokens[self._tokens[at]]
            if shape.holds(num_rows, num_tokens)
        )
        return next(fitting, None)


def token_buckets(most: int) -> list[int]:
    """Every number up to 8, where a token more is a share that counts, then powers of two and the
    numbers half way."""
    return sorted({*range(1, min(most, 8) + 1), *sizes_up_to(most)})
