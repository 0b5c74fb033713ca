"""Lossless speculative decoding of a batch of prompts, whole and without a server. Read this first.

A round writes one or more tokens of every unfinished row:

1. propose: the drafter reads the tokens committed since its last round and draws up to k tokens,
   one after another, each from its own distribution q.
2. forward: one target pass reads the newest committed token and the drafted ones. It gives the
   target's distribution p at every drafted position and at the one after them.
3. verify: from the left, drafted token x is accepted with probability min(1, p(x) / q(x)). A draw
   from max(0, p - q), normalised, replaces the first rejected one. If none is rejected, a bonus
   token is drawn from p. Either way the output is distributed as p, whatever q is.
4. commit: the accepted tokens and that last one join the text, cut at an end-of-text token or at
   the length limit. Keys and values of rejected tokens are overwritten by the next round. The state
   of a recurrent layer cannot be: the one from before the drafted tokens is kept, and the next
   round's target pass begins with the accepted ones.

All draws depend on (seed of the row, position, purpose) alone. `serve/engine` runs the same round
over requests that come and go, and is tested to write the same tokens. Legend: B rows, K drafted
positions, T ragged tokens, V vocabulary, H width of the taps.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import torch

from draftsmith.drafters.interface import DraftInputs, Proposal, ServingDrafter, draft_positions
from draftsmith.drafters.quirks.kept_state import NUM_SIDES, KeptState
from draftsmith.drafters.quirks.recurrent_states import RowRead, Split, StatePass, round_waves
from draftsmith.drafters.target.attention import AttentionContext
from draftsmith.drafters.target.target import Target, TargetOutput
from draftsmith.kernels.acceptance import AcceptanceCounts
from draftsmith.kernels.attention.paged import PagedPass
from draftsmith.kernels.sampling.filters import SamplingRows, process
from draftsmith.kernels.sampling.random_streams import round_seeds
from draftsmith.kernels.verify.chain import verify_chain
from draftsmith.kernels.verify.verdict import Verdict

BLOCK_SIZE = 16


class SpeculatedRound(NamedTuple):
    start: int  # position of the first drafted token; all tokens before it are its context
    drafted: list[int]
    accepted: int  # leading tokens of `drafted` that verification kept
    committed: int  # tokens added to the text: accepted ones and the target's, after the cut


class SpeculatedText(NamedTuple):
    tokens: list[int]  # prompt and answer, with the end-of-text token that was reached
    num_prompt: int
    rounds: list[SpeculatedRound]  # in order; their committed tokens are the whole answer

    def counts(self) -> AcceptanceCounts:
        counts = AcceptanceCounts()
        for one in self.rounds:
            counts.add([len(one.drafted)], [one.accepted], [one.committed])
        return counts


class SpeculatedBatch(NamedTuple):
    texts: list[SpeculatedText]  # in the order of the prompts

    def counts(self) -> AcceptanceCounts:
        total = AcceptanceCounts()
        for text in self.texts:
            total.merge(text.counts())
        return total


@torch.no_grad()
def speculate(
    drafter: ServingDrafter,
    target: Target,
    prompts: Sequence[Sequence[int]],
    *,
    k: int,
    temperature: float,
    seeds: Sequence[int],
    max_new_tokens: int,
) -> SpeculatedBatch:
    """Decode one batch. Every answer follows the target's distribution at `temperature`.

    All prompts are decoded at once: the caller bounds the memory of keys and values by their
    number. `seeds` [B] separate the random streams of the rows. The drafter must be in evaluation
    mode. A prompt without tokens raises a `ValueError`.
    """
    if not prompts or min(map(len, prompts)) < 1:
        raise ValueError(
            "a prompt without tokens has nothing to go on from; give every prompt one token or more"
        )
    rows = rows_of(prompts, seeds)
    batch = SpeculationBatch(drafter, target, rows, k, temperature, max_new_tokens)
    return batch.decode()


@dataclass
class SpeculatedRow:
    index: int
    tokens: list[int]  # committed so far, prompt included
    num_prompt: int
    seed: int
    max_length: int = 0
    finished: bool = False
    rounds: list[SpeculatedRound] = field(default_factory=list)
    draft_cached: int = 0  # leading positions whose state the drafter's cache holds
    taps: torch.Tensor | None = None  # [m, H] of the positions that the drafter has not read
    state: KeptState = field(default_factory=KeptState)  # of a target with recurrent layers
    read: RowRead | None = None  # its share of the last pass over such a target

    @property
    def begin(self) -> int:
        """Position at which the next round's target pass begins."""
        return len(self.tokens) - 1 - self.state.behind


def rows_of(prompts: Sequence[Sequence[int]], seeds: Sequence[int]) -> list[SpeculatedRow]:
    return [
        SpeculatedRow(index, list(prompt), len(prompt), seed)
        for index, (prompt, seed) in enumerate(zip(prompts, seeds, strict=True))
    ]


class SpeculationBatch:
    """Rows, their paged keys and values in both models, and the four steps of a round."""

    def __init__(
        self,
        drafter: ServingDrafter,
        target: Target,
        rows: list[SpeculatedRow],
        k: int,
        temperature: float,
        max_new_tokens: int,
        *,
        spare: int = 0,
    ):
        """`spare` positions behind the longest text have blocks too."""
        self.drafter, self.target, self.rows = drafter, target, rows
        self.k, self.temperature, self.device = k, temperature, target.device
        self.draft_positions = draft_positions(drafter)
        for row in rows:
            row.max_length = min(row.num_prompt + max_new_tokens, target.max_positions)
            row.finished = row.num_prompt >= row.max_length
        # every row owns the blocks of its whole text from the start
        width = -(-(max(row.max_length for row in rows) + spare) // BLOCK_SIZE)
        self.block_tables = torch.arange(len(rows) * width, device=self.device).view(-1, width)
        num_blocks = self.block_tables.numel()
        self.target_pool = target.new_pool(num_blocks, BLOCK_SIZE)
        self.states = target.new_states(NUM_SIDES * len(rows))
        # a draft in training may be wider than the target
        is_module = isinstance(drafter, torch.nn.Module)
        dtype = next(drafter.parameters()).dtype if is_module else target.dtype  # type: ignore[attr-defined]
        self.draft_pool = drafter.new_pool(num_blocks, BLOCK_SIZE, self.device, dtype)

    def decode(self) -> SpeculatedBatch:
        """Runs rounds until all texts have ended."""
        self.prefill()
        while unfinished := self.unfinished():
            for part in self.parts(unfinished):
                self.run_round(part)
        return SpeculatedBatch(
            [SpeculatedText(row.tokens, row.num_prompt, row.rounds) for row in self.rows]
        )

    def unfinished(self) -> list[SpeculatedRow]:
        return [row for row in self.rows if not row.finished]

    def parts(self, rows: list[SpeculatedRow]) -> list[list[SpeculatedRow]]:
        """Rows that may draft, and rows whose text is too long for the drafter's positions."""
        within = [row for row in rows if self.may_draft(row)]
        beyond = [row for row in rows if not self.may_draft(row)]
        return [part for part in (within, beyond) if part]

    def may_draft(self, row: SpeculatedRow) -> bool:
        return self.draft_positions is None or len(row.tokens) < self.draft_positions

    def prefill(self) -> None:
        """Read all of each prompt but its last token, which the first round begins with."""
        rows = [row for row in self.unfinished() if row.num_prompt > 1]
        if rows:
            pieces = [row.tokens[:-1] for row in rows]
            # no logits are needed, but a head cannot run on no rows
            output = self.forward(rows, pieces, [[]] * len(rows), [0] * len(rows), logit_rows=[0])
            lengths = [len(piece) for piece in pieces]
            self.append_taps(rows, lengths, lengths, output)
            for row in rows:
                if row.read is not None:
                    row.read.verified(0)

    def run_round(self, rows: list[SpeculatedRow]) -> None:
        proposal = self.propose(rows)
        lengths = proposal.lengths.tolist()
        drafted = [row[:length] for row, length in zip(proposal.tokens.tolist(), lengths)]
        known = [row.tokens[row.begin :] for row in rows]
        output = self.forward(rows, known, drafted, [row.begin for row in rows])
        verdict = self.verify(rows, proposal, output)
        accepted: list[int] = verdict.accepted.tolist()
        sizes = [len(tokens) + len(more) for tokens, more in zip(known, drafted)]
        self.append_taps(
            rows, sizes, [len(tokens) + count for tokens, count in zip(known, accepted)], output
        )
        for row, offered, count, emitted in zip(rows, drafted, accepted, verdict.tokens.tolist()):
            self.commit(row, offered, count, emitted[: count + 1])

    def propose(self, rows: list[SpeculatedRow]) -> Proposal:
        if not self.may_draft(rows[0]):
            none = torch.zeros(len(rows), 0, dtype=torch.int64, device=self.device)
            return Proposal(tokens=none, lengths=none.sum(dim=1), logits=None)
        unread = [row.tokens[row.draft_cached :] for row in rows]
        taps = [row.taps for row in rows if row.taps is not None]
        # The target emits a token after the drafted ones.
        room = [row.max_length - 1 - len(row.tokens) for row in rows]
        if (positions := self.draft_positions) is not None:
            room = [min(left, positions - len(row.tokens)) for left, row in zip(room, rows)]
        seeds, starts = self.tensor([row.seed for row in rows]), self.starts(rows)
        inputs = DraftInputs(
            tokens=self.tensor([token for tokens in unread for token in tokens]),
            starts=torch.tensor([row.draft_cached for row in rows]),
            lengths=torch.tensor([len(tokens) for tokens in unread]),
            taps=torch.cat(taps) if taps else None,
            num_draft=torch.tensor([min(self.k, left) for left in room]),
            sampling=SamplingRows.of([self.temperature] * len(rows), device=self.device),
            seeds=round_seeds(seeds, starts),
            pool=self.draft_pool,
            block_tables=self.tables(rows),
            histories=[row.tokens for row in rows],
        )
        return self.draft(inputs)

    def draft(self, inputs: DraftInputs) -> Proposal:
        return self.drafter.propose(inputs)

    def forward(
        self,
        rows: list[SpeculatedRow],
        known: list[list[int]],
        drafted: list[list[int]],
        starts: list[int],
        logit_rows: list[int] | None = None,
    ) -> TargetOutput:
        """Target pass over `known[b]`, then `drafted[b]`, at positions `starts[b]` and on. Logits
        [T, V] are those of the last known and of the drafted tokens, or of `logit_rows` alone."""
        pieces = [tokens + more for tokens, more in zip(known, drafted)]
        lengths = [len(piece) for piece in pieces]
        positions = self.tensor(
            [start + at for start, length in zip(starts, lengths) for at in range(length)]
        )
        context: AttentionContext = PagedPass(
            self.target_pool, self.tables(rows), positions, self.tensor(lengths)
        )
        if self.states is not None:
            layers = self.target.state_layers
            reads = [
                layers.row_read(row.index, row.state, start, len(tokens), len(more))
                for row, start, tokens, more in zip(rows, starts, known, drafted)
            ]
            for row, read in zip(rows, reads):
                row.read = read
            context = StatePass(context, Split(round_waves(reads), self.states, self.device))
        ids = self.tensor([token for piece in pieces for token in piece])
        if logit_rows is None:
            ends = itertools.accumulate(lengths)
            logit_rows = [
                at for end, more in zip(ends, drafted) for at in range(end - len(more) - 1, end)
            ]
        chosen = self.tensor(logit_rows)
        return self.target.forward(ids[None], positions[None], context, chosen, self.drafter.taps)

    def verify(
        self, rows: list[SpeculatedRow], proposal: Proposal, output: TargetOutput
    ) -> Verdict:
        sampling = SamplingRows.of([self.temperature] * len(output.logits), device=self.device)
        return verify_chain(
            process(output.logits, sampling),
            proposal.tokens,
            proposal.lengths,
            proposal.logits,
            self.tensor([row.seed for row in rows]),
            self.starts(rows),
        )

    def append_taps(
        self, rows: list[SpeculatedRow], lengths: list[int], kept: list[int], output: TargetOutput
    ) -> None:
        """Store the taps of the first `kept[b]` tokens of each piece, which are committed, but for
        those that were read before."""
        if output.taps is None:
            return
        for row, all_taps, count in zip(rows, output.taps.split(lengths), kept):
            taps = all_taps[row.state.behind : count]
            row.taps = taps if row.taps is None else torch.cat([row.taps, taps])

    def commit(
        self, row: SpeculatedRow, drafted: list[int], accepted: int, emitted: list[int]
    ) -> None:
        """Append `emitted`, the accepted tokens and the target's own, and what the drafter's cache
        holds of them. A target distribution of NaN (token -1) raises a `ValueError`."""
        start = len(row.tokens)
        if emitted[-1] < 0:
            raise ValueError(
                f"the target's distribution at position {start + accepted} is NaN; its weights "
                "are damaged"
            )
        cached = self.drafter.cached_after(start - 1, len(drafted), accepted)
        if row.taps is not None:
            row.taps = row.taps[cached - row.draft_cached :]
        row.draft_cached = cached
        if row.read is not None:
            row.read.verified(accepted)
        committed = emitted[: row.max_length - start]
        ends = [at for at, token in enumerate(committed) if token in self.target.eos_token_ids]
        committed = committed[: ends[0] + 1] if ends else committed
        row.tokens += committed
        row.rounds.append(SpeculatedRound(start, drafted, accepted, len(committed)))
        row.finished = bool(ends) or len(row.tokens) >= row.max_length

    def tensor(self, values: Sequence[int]) -> torch.Tensor:
        return torch.tensor(values, dtype=torch.int64, device=self.device)

    def starts(self, rows: list[SpeculatedRow]) -> torch.Tensor:
        """Position [B] of the next token of each row."""
        return self.tensor([len(row.tokens) for row in rows])

    def tables(self, rows: list[SpeculatedRow]) -> torch.Tensor:
        return self.block_tables[[row.index for row in rows]]
