"""Bans and masks that the host works out from the tokens themselves. Each changes its contexts'
rows of `logits` [R, V] in place."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch

from draftsmith.kernels.dispatch import sent, sent_tensor
from draftsmith.serve.sampling.grammar_matcher import GrammarMatcher
from draftsmith.serve.sampling.state import RowContext


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
