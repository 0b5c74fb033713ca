"""Base of heads without attention (medusa, mlp), which draft from one final state of the target and
the drafted tokens.

At position t they have the state there and the token at t + 1, and predict the token at t + 2
first, the one at t + 2 + s at depth s. There is no cache, so nothing has to be read again. H width
of the state, B rows, L columns, R rows that draft.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Iterator, Sequence

import torch

from draftsmith.drafters.autoregressive.call_graphs import CallLoop
from draftsmith.drafters.autoregressive.draft_sampler import DraftSampler, DraftStep
from draftsmith.drafters.autoregressive.padded_round import PaddedRound, RoundShape
from draftsmith.drafters.autoregressive.state import HeadStep
from draftsmith.drafters.init_from_target import PortableDraft
from draftsmith.drafters.interface import DraftInputs, UnrollBatch, UnrolledStep
from draftsmith.drafters.target.taps import FINAL
from draftsmith.drafters.weights import ReadBytes
from draftsmith.kernels.attention.pool import PagedPool


class StateHead(PortableDraft, CallLoop):
    family: str
    taps: tuple[int, ...] = (FINAL,)
    vocab_map = None
    max_depth: int

    @abstractmethod
    def begin(self, taps: torch.Tensor) -> torch.Tensor:
        """[..., H_t] true states -> [..., H], what depth 0 starts from."""

    @abstractmethod
    def advance(self, state: torch.Tensor, tokens: torch.Tensor, depth: int) -> HeadStep:
        """state [..., H] of the depth before (depth 0: of `begin`), tokens [...] the newest token
        known there."""

    @abstractmethod
    def head_at(self, depth: int) -> torch.Tensor:
        """[V, H], what this depth's head input is multiplied by."""

    @abstractmethod
    def head_weight(self) -> torch.Tensor:
        """[V, H] of all depths; of the first, where they have tables of their own."""

    @property
    @abstractmethod
    def has_own_heads(self) -> bool:
        """True where depths have tables of their own."""

    @abstractmethod
    def read_bytes(self) -> ReadBytes: ...

    def new_pool(
        self, num_blocks: int, block_size: int, device: torch.device, dtype: torch.dtype
    ) -> PagedPool | None:
        return None

    def unroll(self, batch: UnrollBatch) -> Iterator[UnrolledStep]:
        # the last column gets a wrong one, and nothing to predict
        next_ids = torch.roll(batch.input_ids, -1, dims=1)
        positions, has_next = batch.positions, batch.has_next  # column t reads the token at t + 1
        state = self.begin(batch.taps)
        step: HeadStep | None = None
        for depth in range(batch.num_steps):
            if depth < self.max_depth:
                step = self.advance(state, next_ids, depth)
                yield UnrolledStep(
                    hidden=step.head_input,
                    valid=has_next & (positions >= depth),
                    offset=2,
                    head=self.head_at(depth) if self.has_own_heads else None,
                )
                state = torch.nn.functional.pad(step.next_hidden[:, :-1], (0, 0, 1, 0))
            elif step is not None:
                # Nothing is drafted so deep, and nothing may stand in for it.
                yield UnrolledStep(
                    hidden=torch.zeros_like(step.head_input),
                    valid=torch.zeros_like(has_next),
                    offset=2,
                )

    def draft_call(self, inputs: DraftInputs, sampler: DraftSampler) -> None:
        rows = (inputs.lengths > 1).nonzero()[:, 0]  # one token alone has no state before it
        plan = sampler.plan(rows.tolist(), self.max_depth)
        if not plan.alive or inputs.taps is None:
            return
        columns = newest_columns(inputs, rows)
        parts, depths = plan.sent(inputs.tokens.device, *columns)
        tokens, state, positions = self.newest(inputs, inputs.taps, parts)
        for depth, (chosen, kept, _) in enumerate(depths):
            if kept is not None:
                positions, tokens, state = positions[kept], tokens[kept], state[kept]
            step = self.advance(state, tokens, depth)
            tokens = sampler.draw(
                chosen, depth, step.head_input @ self.head_at(depth).T, positions + 1 + depth
            )
            state = step.next_hidden

    def draft_padded(
        self, padded: PaddedRound, shape: RoundShape, pool: PagedPool | None
    ) -> list[DraftStep]:
        last = padded.last[:, None]
        taps, tokens = padded.taps(last), padded.tokens(last)[:, 0]
        assert taps is not None
        state, newest, drawn = self.begin(taps[:, 0]), padded.starts + padded.last + 1, []
        for depth in range(shape.depths):
            step = self.advance(state, tokens, depth)
            logits = step.head_input @ self.head_at(depth).T
            drawn.append(padded.draw(logits, newest + 1 + depth, self.vocab_map))
            tokens, state = drawn[-1].tokens, step.next_hidden
        return drawn

    def newest(
        self, inputs: DraftInputs, taps: torch.Tensor, parts: Sequence[torch.Tensor]
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """(newest committed tokens [R], states [R, H] that depth 0 starts from, positions [R] of
        the tokens). `parts` are the `newest_columns` of R rows, on the device; `taps` are those of
        `inputs`."""
        tap_rows, token_rows, positions = parts
        return inputs.tokens[token_rows], self.begin(taps[tap_rows]), positions

    def cached_after(self, last: int, drafted: int, accepted: int) -> int:
        """There is no cache; one state is needed, that before the newest token."""
        return last + accepted


def newest_columns(inputs: DraftInputs, rows: torch.Tensor) -> tuple[torch.Tensor, ...]:
    """Places where `rows` [R] (on the host), each with a token before its newest one, have their
    newest taps and tokens, and the position of the token."""
    # Taps are ragged like the tokens, one fewer a row; only the last of each row counts.
    columns = ((inputs.lengths - 1).cumsum(0)[rows] - 1, inputs.lengths.cumsum(0)[rows] - 1)
    return (*columns, (inputs.starts + inputs.lengths - 1)[rows])
