"""Adjustment of raw logits to the request's parameters, for drafting and verification alike.

transformers' order: bias, repetition penalty (then frequency and presence), bad words, least number
of tokens, allowed ids, grammar, the request's own processors; temperature and filters
(`kernels/sampling/filters.py`) come after. Every row is adjusted with the tokens before it, the
drafted ones included, so that verification sees the distribution that plain decoding would have
seen there.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cached_property
from typing import NamedTuple

import torch

from draftsmith.drafters.target.target import Target
from draftsmith.kernels.dispatch import read_freely, sent, sent_tensor
from draftsmith.serve.sampling.grammar_matcher import GrammarCompiler
from draftsmith.serve.sampling.params import SamplingParams, check_vocabulary
from draftsmith.serve.sampling.processors import check_processors, run_processors
from draftsmith.serve.sampling.stages import ban, mask
from draftsmith.serve.sampling.state import RowContext, SamplingState
from draftsmith.serve.sampling.tables import AdjustmentTables, numbered


class Adjustments:
    """Adjustments of one round's requests, in their order; a `drafters/interface.py: Adjust`."""

    def __init__(self, states: Sequence[SamplingState | None]):
        self.states = states
        self._tables: AdjustmentTables | None = None
        self._next: tuple[torch.Tensor, torch.Tensor] | None = None

    @classmethod
    def of(
        cls, states: Sequence[SamplingState | None], texts: Sequence[list[int]]
    ) -> Adjustments | None:
        """Adjustments for requests whose tokens are now `texts`; None when no request asks for any:
        then nothing is computed."""
        if states.count(None) == len(states):
            return None
        for state, tokens in zip(states, texts, strict=True):
            if state is not None:
                state.follow(tokens)
        return cls(states)

    @cached_property
    def reads_tokens(self) -> bool:
        """True where the host needs the drafted tokens."""
        return any(state is not None and state.reads_tokens for state in self.states)

    @cached_property
    def _runs_processors(self) -> bool:
        return any(state is not None and state.params.logits_processors for state in self.states)

    def __call__(
        self, logits: torch.Tensor, rows: torch.Tensor, prefixes: torch.Tensor
    ) -> torch.Tensor:
        """A new tensor [R, V] of draft logits; row r is that of request `rows[r]` behind the
        drafted tokens of `prefixes[r]` that are not negative.

        What the host works out from drafted tokens takes one look at the device.
        """
        owners = read_freely(rows)
        adjusted = logits.clone()
        self._tables_on(logits.device).apply(adjusted, rows, prefixes, owners)
        if not self.reads_tokens:
            return adjusted
        if owners is None and prefixes.shape[1] == 0 and not self._runs_processors:
            which, forbidden = self._next_on(logits)
            return adjusted.masked_fill_(forbidden[which[rows]], -torch.inf)
        known: list[list[int]] = torch.cat([rows[:, None], prefixes], dim=1).tolist()
        drafted = [[token for token in row[1:] if token >= 0] for row in known]
        self._on_host(adjusted, rows, [row[0] for row in known], drafted)
        return adjusted

    def apply(
        self,
        logits: torch.Tensor,
        rows: torch.Tensor,
        drafted: torch.Tensor,
        owners: Sequence[int],
        prefixes: Sequence[list[int]],
    ) -> torch.Tensor:
        """Adjusted logits [R, V] of the target; arguments as `AdjustmentTables.apply`'s. `prefixes`
        are the drafted tokens on the host where a request `reads_tokens`."""
        adjusted = logits.clone()
        self._tables_on(logits.device).apply(adjusted, rows, drafted, owners)
        if self.reads_tokens:
            self._on_host(adjusted, rows, owners, prefixes)
        return adjusted

    def _tables_on(self, device: torch.device) -> AdjustmentTables:
        """Tables of the round, made once."""
        if self._tables is None:
            self._tables = AdjustmentTables.of(self.states, device)
        return self._tables

    def _next_on(self, logits: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """([B] int64, [n, V] bool) on the device of `logits` [R, V], made once: which row of the
        matrix has the tokens that the host forbids a request behind its committed ones. The first
        forbids none."""
        if self._next is None:
            own = [state is not None and state.reads_tokens for state in self.states]
            asking = [state for state in self.states if state is not None and state.reads_tokens]
            contexts = [
                RowContext(row, state, []) for row, state in enumerate(asking, 1) if not state.error
            ]
            scores = torch.zeros(len(asking) + 1, logits.shape[1])
            ban(scores, contexts)
            mask(scores, contexts)
            (which,) = sent(logits.device, numbered(own))
            self._next = which, sent_tensor(logits.device, scores < 0)
        return self._next

    def _on_host(
        self,
        logits: torch.Tensor,
        rows: torch.Tensor,
        owners: Sequence[int],
        prefixes: Sequence[list[int]],
    ) -> None:
        """Apply, in place, what the host works out from the tokens."""
        contexts = [
            RowContext(row, state, prefix)
            for row, (owner, prefix) in enumerate(zip(owners, prefixes, strict=True))
            # Behind the end of an answer no distribution is read.
            if (state := self.states[owner]) is not None
            and not state.error
            and state.ends.isdisjoint(prefix)
        ]
        ban(logits, contexts)
        mask(logits, contexts)
        if run_processors(logits, contexts):
            # What a processor gave back to a forbidden token is taken again.
            self._tables_on(logits.device).restrict(logits, rows)
            mask(logits, contexts)
        # Without a distribution its request ends.
        failed = [
            row
            for row, owner in enumerate(owners)
            if (state := self.states[owner]) is not None and state.error
        ]
        if failed:
            logits[sent(logits.device, failed)[0]] = -torch.inf


def sampling_state(
    params: SamplingParams,
    prompt: Sequence[int],
    target: Target,
    compiler: Callable[[], GrammarCompiler],
) -> SamplingState | None:
    """State of a new request's adjustments, None for most; raises `UserError` for parameters that
    this target cannot honour."""
    check_vocabulary(params, target.vocab_size, target.eos_token_ids)
    if not params.adjusts:
        return None
    check_processors(
        params.logits_processors, prompt, vocab_size=target.vocab_size, device=target.device
    )
    return SamplingState(
        params,
        num_prompt=len(prompt),
        vocab_size=target.vocab_size,
        eos_token_ids=target.eos_token_ids,
        matcher=None if params.grammar is None else compiler().compile(params.grammar),
        device=target.device,
    )


class DraftPrefixes(NamedTuple):
    """Owner and drafted prefix of every row of target logits."""

    owners: list[int]  # which request's
    drafted: list[list[int]]  # the drafted tokens before it


def tree_prefixes(
    drafted: Sequence[Sequence[int]], parents: Sequence[Sequence[int]]
) -> DraftPrefixes:
    """Prefixes of trees: `parents[b][i]` is the node before node i of row b, -1 where that is the
    last committed token."""
    prefixes = DraftPrefixes([], [])
    for owner, (tokens, above) in enumerate(zip(drafted, parents, strict=True)):
        paths: list[list[int]] = [[]]
        for token, parent in zip(tokens, above):
            paths.append([*paths[parent + 1], token])
        prefixes.owners.extend([owner] * len(paths))
        prefixes.drafted.extend(paths)
    return prefixes
