"""Biases, bans and masks, as transformers' processors apply them. Each changes its contexts' rows
of `logits` [R, V] in place."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence
from typing import NamedTuple

import torch

from draftsmith.serve.sampling.grammar_matcher import GrammarMatcher
from draftsmith.serve.sampling.state import RowContext, TokenCounts


def add_biases(logits: torch.Tensor, contexts: Sequence[RowContext]) -> None:
    biased = [context for context in contexts if len(context.state.bias_ids)]
    if biased:
        counts = torch.tensor(
            [len(context.state.bias_ids) for context in biased], device=logits.device
        )
        rows = torch.repeat_interleave(_rows(biased, logits.device), counts)
        ids = torch.cat([context.state.bias_ids for context in biased])
        logits[rows, ids] += torch.cat([context.state.bias_values for context in biased]).to(
            logits.dtype
        )


def ban(logits: torch.Tensor, contexts: Sequence[RowContext]) -> None:
    """Bad words that would be completed, and ends that would come before `min_tokens`."""
    banned = [
        (context.row, token)
        for context in contexts
        for token in context.state.banned(context.prefix)
    ]
    if banned:
        rows, tokens = torch.tensor(banned, device=logits.device).T
        logits[rows, tokens] = -math.inf


def restrict(logits: torch.Tensor, contexts: Sequence[RowContext]) -> None:
    """Allowed ids and the grammar."""
    listed = [
        (context, context.state.forbidden)
        for context in contexts
        if context.state.forbidden is not None
    ]
    if listed:
        rows = _rows([context for context, _ in listed], logits.device)
        logits[rows] = logits[rows].masked_fill(
            torch.stack([forbidden for _, forbidden in listed]), -math.inf
        )
    for state in {id(context.state): context.state for context in contexts}.values():
        if state.matcher is not None:
            own = [context for context in contexts if context.state is state]
            rows = _rows(own, logits.device)
            logits[rows] = logits[rows].masked_fill(
                ~_allowed(state.matcher, own, logits.shape[-1]).to(logits.device), -math.inf
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
    return torch.tensor([context.row for context in contexts], device=device)


class _Seen(NamedTuple):
    """M pairs of a context and a token that occurs before it."""

    contexts: torch.Tensor  # [M] int64, which of the contexts
    ids: torch.Tensor  # [M] int64
    output: torch.Tensor  # [M] float32: how often in the output, drafted tokens included
    prompt: torch.Tensor  # [M] bool: whether in the prompt


def penalise(logits: torch.Tensor, contexts: Sequence[RowContext]) -> None:
    """transformers' repetition penalty, then OpenAI's frequency and presence, on `logits` [R, V] in
    place."""
    counted = [
        (context, counts) for context in contexts if (counts := context.state.counts) is not None
    ]
    if not counted:
        return
    seen = _seen(counted)
    rows = torch.tensor([context.row for context, _ in counted], device=logits.device)[
        seen.contexts
    ]
    params = [context.state.params for context, _ in counted]
    values = [
        (one.repetition_penalty, one.frequency_penalty, one.presence_penalty) for one in params
    ]
    repetition, frequency, presence = torch.tensor(
        values, dtype=logits.dtype, device=logits.device
    )[seen.contexts].T
    output = seen.output.to(logits.dtype)
    in_output = output > 0
    scores = logits[rows, seen.ids]
    repeated = torch.where(scores < 0, scores * repetition, scores / repetition)
    scores = torch.where(in_output | seen.prompt, repeated, scores)
    logits[rows, seen.ids] = scores - frequency * output - presence * in_output


def _seen(counted: Sequence[tuple[RowContext, TokenCounts]]) -> _Seen:
    again: list[int] = []  # pairs of drafted tokens that had occurred before
    fresh: Counter[tuple[int, int]] = Counter()  # (context, token) of those that had not
    num_pairs = 0
    for place, (context, counts) in enumerate(counted):
        for token in context.prefix:
            if token in counts.slots:
                again.append(num_pairs + counts.slots[token])
            else:
                fresh[place, token] += 1
        num_pairs += len(counts.slots)
    device = counted[0][1].ids.device
    sizes = torch.tensor([len(counts.slots) for _, counts in counted], device=device)
    owners = torch.repeat_interleave(
        torch.arange(len(sizes), device=device), sizes, output_size=num_pairs
    )
    more = torch.tensor([*fresh], dtype=torch.int64, device=device).reshape(-1, 2)
    times = torch.tensor([*fresh.values()], dtype=torch.float32, device=device)
    seen = _Seen(
        torch.cat([owners, more[:, 0]]),
        torch.cat([*(counts.ids for _, counts in counted), more[:, 1]]),
        torch.cat([*(counts.output for _, counts in counted), times]),
        torch.cat(
            [*(counts.prompt for _, counts in counted), torch.zeros_like(times, dtype=torch.bool)]
        ),
    )
    if again:
        at = torch.tensor(again, device=device)
        seen.output.index_add_(0, at, torch.ones_like(at, dtype=seen.output.dtype))
    return seen
