"""Reading the committed tokens that a drafter has not read.

The state at position t predicts the token at t + ahead and comes from the one before it: with ahead
2 the newest token of a row has no state yet. B rows of the batch, R rows with something to read, T
tokens to be read.
"""

from __future__ import annotations

import itertools
from typing import NamedTuple

from draftsmith.drafters.autoregressive.draft_sampler import DepthPlan, RowsAtDepth
from draftsmith.drafters.autoregressive.state import DraftPrefill, ReadsCommitted
from draftsmith.drafters.interface import DraftInputs
from draftsmith.kernels.attention.paged import PagedPass


class Unread(NamedTuple):
    """Tokens that a round has to read, on the host."""

    rows: list[int]  # [R] of the batch, ascending
    counts: list[int]  # [R] tokens of each
    starts: list[int]  # [R] position of the first state
    begins: list[int]  # [R] index of the first token among the inputs' tokens

    @classmethod
    def of(cls, inputs: DraftInputs, ahead: int) -> Unread:
        found = cls([], [], [], [])
        begin, without = 0, ahead - 1  # tokens of a row that have no state of their own
        for row, (start, length) in enumerate(zip(inputs.starts.tolist(), inputs.lengths.tolist())):
            if length > without:
                found.rows.append(row)
                found.counts.append(length - without)
                found.starts.append(start)
                found.begins.append(begin + without)
            begin += length
        return found

    def spread(self, begins: list[int]) -> list[int]:
        """[T] numbers counting up in each row from its own of `begins` [R]."""
        pairs = zip(begins, self.counts)
        return [number for begin, count in pairs for number in range(begin, begin + count)]


def read_unread(
    drafter: ReadsCommitted, inputs: DraftInputs, unread: Unread, plan: DepthPlan
) -> tuple[DraftPrefill, list[RowsAtDepth]]:
    """The states that rows draft from, and the plan on the device: everything from the host arrives
    in one copy."""
    (positions, tokens, rows, counts, ends, budgets), depths = plan.sent(
        inputs.tokens.device,
        unread.spread(unread.starts),
        unread.spread(unread.begins) if drafter.ahead > 1 else [],
        unread.rows,
        unread.counts,
        [end - 1 for end in itertools.accumulate(unread.counts)],
        plan.budgets_of(unread.rows),
    )
    every = len(unread.rows) == len(inputs.block_tables)
    tables = inputs.block_tables if every else inputs.block_tables[rows]
    context = PagedPass(inputs.own_pool, tables, positions, counts)
    ids = inputs.tokens[tokens] if drafter.ahead > 1 else inputs.tokens
    step = drafter.read_committed(ids, inputs.taps, context)
    return DraftPrefill(
        unread.rows, rows, budgets, positions[ends], tables, step.select(ends)
    ), depths
