"""Biases, bans and masks, as transformers' processors apply them. Each changes its sites' rows of
`logits` [R, V] in place."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence
from typing import NamedTuple

import torch

from draftsmith.serve.sampling.grammar_matcher import GrammarMatcher
from draftsmith.serve.sampling.state import RowContext, TokenCounts


def add_biases(logits: torch.Tensor, sites: Sequence[RowContext]) -> None:
    biased = [site for site in sites if len(site.state.bias_ids)]
    if biased:
        counts = torch.tensor([len(site.state.bias_ids) for site in biased], device=logits.device)
        rows = torch.repeat_interleave(_rows(biased, logits.device), counts)
        ids = torch.cat([site.state.bias_ids for site in biased])
        logits[rows, ids] += torch.cat([site.state.bias_values for site in biased]).to(logits.dtype)


def ban(logits: torch.Tensor, sites: Sequence[RowContext]) -> None:
    """Bad words that would be completed, and ends that would come before `min_tokens`."""
    banned = [(site.row, token) for site in sites for token in site.state.banned(site.prefix)]
    if banned:
        rows, tokens = torch.tensor(banned, device=logits.device).T
        logits[rows, tokens] = -math.inf


def restrict(logits: torch.Tensor, sites: Sequence[RowContext]) -> None:
    """Allowed ids and the grammar."""
    listed = [(site, site.state.forbidden) for site in sites if site.state.forbidden is not None]
    if listed:
        rows = _rows([site for site, _ in listed], logits.device)
        logits[rows] = logits[rows].masked_fill(
            torch.stack([forbidden for _, forbidden in listed]), -math.inf
        )
    for state in {id(site.state): site.state for site in sites}.values():
        if state.matcher is not None:
            own = [site for site in sites if site.state is state]
            rows = _rows(own, logits.device)
            logits[rows] = logits[rows].masked_fill(
                ~_allowed(state.matcher, own, logits.shape[-1]).to(logits.device), -math.inf
            )


def _allowed(matcher: GrammarMatcher, sites: Sequence[RowContext], vocab_size: int) -> torch.Tensor:
    """What the grammar of one request allows at its sites: [n, V] bool.

    Where it fails the sites are asked one by one, and those where it fails again allow nothing:
    behind drafted tokens that says nothing about the sites before them.
    """
    try:
        return torch.from_numpy(matcher.masks([site.prefix for site in sites]))
    except Exception:
        masks = torch.zeros(len(sites), vocab_size, dtype=torch.bool)
        for mask, site in zip(masks, sites):
            with site.state.owning("the grammar", site.prefix):
                mask.copy_(torch.from_numpy(matcher.masks([site.prefix])[0]))
        return masks


def _rows(sites: Sequence[RowContext], device: torch.device) -> torch.Tensor:
    return torch.tensor([site.row for site in sites], device=device)


class _Seen(NamedTuple):
    """M pairs of a site and a token that occurs before it."""

    sites: torch.Tensor  # [M] int64, which of the sites
    ids: torch.Tensor  # [M] int64
    output: torch.Tensor  # [M] float32: how often in the output, drafted tokens included
    prompt: torch.Tensor  # [M] bool: whether in the prompt


def penalise(logits: torch.Tensor, sites: Sequence[RowContext]) -> None:
    """transformers' repetition penalty, then OpenAI's frequency and presence, on `logits` [R, V] in
    place."""
    counted = [(site, counts) for site in sites if (counts := site.state.counts) is not None]
    if not counted:
        return
    seen = _seen(counted)
    rows = torch.tensor([site.row for site, _ in counted], device=logits.device)[seen.sites]
    params = [site.state.params for site, _ in counted]
    values = [
        (one.repetition_penalty, one.frequency_penalty, one.presence_penalty) for one in params
    ]
    repetition, frequency, presence = torch.tensor(
        values, dtype=logits.dtype, device=logits.device
    )[seen.sites].T
    output = seen.output.to(logits.dtype)
    in_output = output > 0
    scores = logits[rows, seen.ids]
    repeated = torch.where(scores < 0, scores * repetition, scores / repetition)
    scores = torch.where(in_output | seen.prompt, repeated, scores)
    logits[rows, seen.ids] = scores - frequency * output - presence * in_output


def _seen(counted: Sequence[tuple[RowContext, TokenCounts]]) -> _Seen:
    again: list[int] = []  # pairs of drafted tokens that had occurred before
    fresh: Counter[tuple[int, int]] = Counter()  # (site, token) of those that had not
    num_pairs = 0
    for place, (site, counts) in enumerate(counted):
        for token in site.prefix:
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
