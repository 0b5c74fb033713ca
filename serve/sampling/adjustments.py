"""Adjustment of raw logits to the request's parameters, for drafting and verification alike.

transformers' order: bias, repetition penalty (then frequency and presence), bad words, least number
of tokens, allowed ids, grammar, the request's own processors; temperature and filters
(`kernels/sampling/filters.py`) come after. Every row is adjusted with the tokens before it, the
drafted ones included, so that verification sees the distribution that plain decoding would have
seen there. `tables.py` does what needs no token on the host, the functions below what does, in
place.

A request's own transformers `LogitsProcessor` has to be a pure function of (input_ids [1, n],
scores [1, V]). It is called once for every position of every round, in drafting and in verifying,
on texts that grow by drafted tokens and shrink again when those fall; what it returns for a text
must not depend on what it was called with before.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from functools import cached_property

import torch

from draftsmith.drafters.target.target import Target
from draftsmith.errors import UserError
from draftsmith.kernels.dispatch import read_freely, sent, sent_tensor
from draftsmith.serve.sampling.grammar_matcher import GrammarCompiler, GrammarMatcher
from draftsmith.serve.sampling.params import LogitsProcessor, SamplingParams, check_vocabulary
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


def ban(logits: torch.Tensor, contexts: Sequence[RowContext]) -> None:
    """Bad words of several tokens that would be completed."""
    banned = [
        (context.row, token)
        for context in contexts
        for token in context.state.completed(context.prefix)
    ]
    if banned:
        rows, tokens = sent(logits.device, *zip(*banned))
        logits[rows, tokens] = -math.inf


def mask(logits: torch.Tensor, contexts: Sequence[RowContext]) -> None:
    """The grammars."""
    for state in {id(context.state): context.state for context in contexts}.values():
        if state.matcher is not None:
            own = [context for context in contexts if context.state is state]
            rows = _rows(own, logits.device)
            forbidden = ~_allowed(state.matcher, own, logits.shape[-1])
            logits[rows] = logits[rows].masked_fill(
                sent_tensor(logits.device, forbidden), -math.inf
            )


def _allowed(
    matcher: GrammarMatcher, contexts: Sequence[RowContext], vocab_size: int
) -> torch.Tensor:
    """[n, V] bool of the tokens that the grammar of one request allows in its rows.

    Where it fails the rows are tried one by one, and those where it fails again allow nothing:
    behind drafted tokens that says nothing about the rows before them.
    """
    try:
        return torch.from_numpy(matcher.masks([context.prefix for context in contexts]))
    except Exception:
        masks = torch.zeros(len(contexts), vocab_size, dtype=torch.bool)
        for mask, context in zip(masks, contexts):
            with context.state.owning("the grammar", context.prefix):
                mask.copy_(torch.from_numpy(matcher.masks([context.prefix])[0]))
        return masks


def _rows(contexts: Sequence[RowContext], device: torch.device) -> torch.Tensor:
    return sent(device, [context.row for context in contexts])[0]


def check_processors(
    processors: Sequence[LogitsProcessor],
    prompt: Sequence[int],
    *,
    vocab_size: int,
    device: torch.device,
) -> None:
    """Calls each on a text, a longer one and the first again; a `UserError` for one that raises or
    answers otherwise then."""
    scores = torch.randn(1, vocab_size, generator=torch.Generator().manual_seed(0)).to(device)
    text = torch.tensor([list(prompt)], device=device)
    longer = torch.cat([text, text[:, -1:]], dim=1)
    for processor in processors:
        name = type(processor).__name__
        try:
            first, _, again = (
                processor(ids.clone(), scores.clone()) for ids in (text, longer, text)
            )
        except Exception as error:
            # Code of a caller: whatever it raises, the request cannot be honoured.
            raise UserError(
                f"logits processor {name} raised {type(error).__name__}: {error}; mend or leave "
                "it out"
            ) from error
        if not isinstance(first, torch.Tensor) or first.shape != scores.shape:
            raise UserError(
                f"logits processor {name} must return scores of shape {list(scores.shape)} for "
                "input_ids of one row"
            )
        if not torch.equal(first.nan_to_num(), again.nan_to_num()):
            raise UserError(
                f"logits processor {name} gave two answers to one text; speculation needs a pure "
                "function of input_ids and scores"
            )


def run_processors(logits: torch.Tensor, contexts: Sequence[RowContext]) -> bool:
    """Row by row in place, with the exact text before each; False when there are none.

    A row whose processor raises is left without any token. Behind drafted tokens that says nothing
    about the rows before it.
    """
    own = [context for context in contexts if context.state.params.logits_processors]
    for context in own:
        scores = torch.full_like(logits[context.row], -math.inf)
        with context.state.owning("a logits processor", context.prefix):
            scores = _processed(logits[context.row], context.state, context.prefix)
        logits[context.row] = scores
    return bool(own)


def _processed(scores: torch.Tensor, state: SamplingState, prefix: Sequence[int]) -> torch.Tensor:
    input_ids = sent_tensor(scores.device, torch.tensor([[*state.tokens, *prefix]]))
    processed = scores[None].clone()
    for processor in state.params.logits_processors:
        processed = processor(input_ids, processed)
    return processed[0].to(scores.dtype)
