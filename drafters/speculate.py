"""Rounds of a draft and its target over a batch of prompts, outside any server: what tau is
measured by while a draft trains, and where on-policy text comes from.

Distributions, streams and caches are those of serving (tested equal); what a server adds, that
requests come, wait and go, is not here. Legend: B rows, T ragged tokens, n position of a row's
newest token, which the target has not read yet.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import torch

from draftsmith.drafters.interface import DraftInputs, Proposal, ServingDrafter
from draftsmith.drafters.target.target import Target, TargetOutput
from draftsmith.kernels.acceptance import AcceptanceCounts
from draftsmith.kernels.attention.paged import PagedPass
from draftsmith.kernels.sampling.filters import SamplingRows, process
from draftsmith.kernels.sampling.random_streams import round_seeds
from draftsmith.kernels.verify.chain import verify_chain

BLOCK_SIZE = 16


class Round(NamedTuple):
    start: int  # position of its first drafted token: all tokens before it are the round's context
    drafted: list[int]
    # how many of `drafted` were kept; an end of text among them takes the later ones away again
    accepted: int
    # tokens that the round added to the text: kept drafts and one of the target, trimmed
    committed: int


class SpeculatedText(NamedTuple):
    tokens: list[int]  # prompt and answer; an end-of-text token included where it was reached
    num_prompt: int
    rounds: list[Round]  # in order; together they wrote the whole answer

    def counts(self) -> AcceptanceCounts:
        counts = AcceptanceCounts()
        counts.add(
            [len(one.drafted) for one in self.rounds],
            [one.accepted for one in self.rounds],
            [one.committed for one in self.rounds],
        )
        return counts


class Rounds(NamedTuple):
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
) -> Rounds:
    """Lossless decoding of one batch: every answer follows the target's distribution at
    `temperature`, whatever the draft is.

    All prompts are decoded at once, so the caller decides how many keys and values are held.
    `seeds` gives each its own random streams. The draft is run as it is: put it in evaluation mode
    first.
    """
    rows = [
        _Row(list(prompt), len(prompt), seed) for prompt, seed in zip(prompts, seeds, strict=True)
    ]
    if not rows or min(row.num_prompt for row in rows) < 1:
        raise ValueError(
            "a prompt without tokens has nothing to go on from; give every prompt one token or more"
        )
    batch = _Batch(
        drafter, target, rows, k=k, temperature=temperature, max_new_tokens=max_new_tokens
    )
    batch.read_prompts()
    while batch.active():
        batch.play_round()
    return Rounds([SpeculatedText(row.tokens, row.num_prompt, row.rounds) for row in rows])


@dataclass
class _Row:
    tokens: list[int]
    num_prompt: int
    seed: int
    rounds: list[Round] = field(default_factory=list)
    done: bool = False
    draft_cached: int = 0  # positions that the draft's cache holds
    taps: torch.Tensor | None = None  # [m, n * H] of positions draft_cached .. n - 1


class _Batch:
    def __init__(
        self,
        drafter: ServingDrafter,
        target: Target,
        rows: list[_Row],
        *,
        k: int,
        temperature: float,
        max_new_tokens: int,
    ):
        self.drafter, self.target, self.rows, self.k, self.temperature = (
            drafter,
            target,
            rows,
            k,
            temperature,
        )
        self.device = target.device
        self.limits = [min(row.num_prompt + max_new_tokens, target.max_positions) for row in rows]
        for row, limit in zip(rows, self.limits):
            row.done = row.num_prompt >= limit
        width = -(-max(self.limits) // BLOCK_SIZE)
        self.tables = torch.arange(len(rows) * width, device=self.device).view(len(rows), width)
        num_blocks = self.tables.numel()
        self.target_pool = target.new_pool(num_blocks, BLOCK_SIZE)
        self.draft_pool = drafter.new_pool(
            num_blocks, BLOCK_SIZE, self.device, _dtype_of(drafter, target)
        )

    def active(self) -> list[int]:
        return [index for index, row in enumerate(self.rows) if not row.done]

    def read_prompts(self) -> None:
        """All of each prompt but its last token, with which the first round begins."""
        long = [index for index in self.active() if self.rows[index].num_prompt > 1]
        if not long:
            return
        pieces = [self.rows[index].tokens[:-1] for index in long]
        # Nothing is decided yet, but a head cannot run on no rows.
        output = self._forward(long, pieces, [0] * len(long), [0])
        self._keep_taps(
            long, [len(piece) for piece in pieces], [len(piece) for piece in pieces], output
        )

    def play_round(self) -> None:
        active = self.active()
        rows = [self.rows[index] for index in active]
        proposal = self._propose(active)
        lengths: list[int] = proposal.lengths.tolist()
        drafts = [tokens[:length] for tokens, length in zip(proposal.tokens.tolist(), lengths)]
        pieces = [[row.tokens[-1], *drafted] for row, drafted in zip(rows, drafts)]
        output = self._forward(active, pieces, [len(row.tokens) - 1 for row in rows])
        distribution = SamplingRows.of([self.temperature] * len(output.logits), device=self.device)
        starts = [len(row.tokens) for row in rows]
        verdict = verify_chain(
            process(output.logits, distribution),
            proposal.tokens,
            proposal.lengths,
            proposal.logits,
            torch.tensor([row.seed for row in rows], device=self.device),
            torch.tensor(starts, device=self.device),
        )
        accepted: list[int] = verdict.accepted.tolist()
        self._keep_taps(
            active, [len(piece) for piece in pieces], [kept + 1 for kept in accepted], output
        )
        for index, drafted, kept, tokens in zip(active, drafts, accepted, verdict.tokens.tolist()):
            self._commit(index, drafted, kept, tokens[: kept + 1])

    def _propose(self, active: list[int]) -> Proposal:
        rows = [self.rows[index] for index in active]
        unread = [row.tokens[row.draft_cached :] for row in rows]
        # The target adds a token of its own, so the last one is never drafted.
        room = [
            min(self.k, self.limits[index] - len(self.rows[index].tokens) - 1) for index in active
        ]
        taps = [row.taps for row in rows if row.taps is not None]
        seeds = torch.tensor([row.seed for row in rows], device=self.device)
        positions = torch.tensor([len(row.tokens) for row in rows], device=self.device)
        inputs = DraftInputs(
            tokens=torch.tensor(
                [token for tokens in unread for token in tokens], device=self.device
            ),
            starts=torch.tensor([row.draft_cached for row in rows]),
            lengths=torch.tensor([len(tokens) for tokens in unread]),
            taps=torch.cat(taps) if taps else None,
            num_draft=torch.tensor(room),
            sampling=SamplingRows.of([self.temperature] * len(rows), device=self.device),
            seeds=round_seeds(seeds, positions),
            pool=self.draft_pool,
            block_tables=self.tables[active],
            histories=[row.tokens for row in rows],
        )
        return self.drafter.propose(inputs)

    def _forward(
        self,
        active: list[int],
        pieces: list[list[int]],
        begins: list[int],
        logit_rows: list[int] | None = None,
    ) -> TargetOutput:
        """`pieces[b]` are read at positions `begins[b]` and on; logits of all of them unless
        `logit_rows` are named."""
        lengths = [len(piece) for piece in pieces]
        places = [
            begin + offset for begin, length in zip(begins, lengths) for offset in range(length)
        ]
        positions = torch.tensor(places, device=self.device)
        context = PagedPass(
            self.target_pool,
            self.tables[active],
            positions,
            torch.tensor(lengths, device=self.device),
        )
        ids = torch.tensor([[token for piece in pieces for token in piece]], device=self.device)
        wanted = torch.tensor(
            list(range(len(places))) if logit_rows is None else logit_rows, device=self.device
        )
        return self.target.forward(ids, positions[None], context, wanted, self.drafter.taps)

    def _keep_taps(
        self, active: list[int], lengths: list[int], kept: list[int], output: TargetOutput
    ) -> None:
        """The first `kept[b]` of a row's `lengths[b]` tokens in this pass are part of its text."""
        if output.taps is None:
            return
        for index, taps, count in zip(active, output.taps.split(lengths), kept):
            row = self.rows[index]
            row.taps = taps[:count] if row.taps is None else torch.cat([row.taps, taps[:count]])

    def _commit(self, index: int, drafted: list[int], accepted: int, emitted: list[int]) -> None:
        row = self.rows[index]
        last = len(row.tokens) - 1
        if emitted[-1] < 0:
            raise ValueError(
                f"the target's distribution at position {last + accepted + 1} is NaN; its weights "
                "are damaged"
            )
        cached = self.drafter.cached_after(last, len(drafted), accepted)
        if row.taps is not None:
            row.taps = row.taps[cached - row.draft_cached :]
        row.draft_cached = cached
        committed = emitted[: self.limits[index] - len(row.tokens)]
        ends = [at for at, token in enumerate(committed) if token in self.target.eos_token_ids]
        committed = committed[: ends[0] + 1] if ends else committed
        row.rounds.append(Round(len(row.tokens), drafted, accepted, len(committed)))
        row.tokens += committed
        row.done = bool(ends) or len(row.tokens) >= self.limits[index]


def _dtype_of(drafter: ServingDrafter, target: Target) -> torch.dtype:
    """A trained draft keeps its own while it trains, wider than the target's perhaps."""
    if isinstance(drafter, torch.nn.Module):
        return next(drafter.parameters()).dtype
    return target.dtype
