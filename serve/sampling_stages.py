"""The stages that make a request's law of raw logits, in the order in which `serve/sampling.py` calls them.

Each changes the rows of its sites in `logits` [R, V] in place; the formulas are those of transformers' processors and, for
presence and frequency penalties, OpenAI's.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch

from draftsmith.serve.sampling_state import Site


def add_biases(logits: torch.Tensor, sites: Sequence[Site]) -> None:
    biased = [site for site in sites if len(site.state.bias_ids)]
    if biased:
        counts = torch.tensor([len(site.state.bias_ids) for site in biased], device=logits.device)
        rows = torch.repeat_interleave(_rows(biased, logits.device), counts)
        ids = torch.cat([site.state.bias_ids for site in biased])
        logits[rows, ids] += torch.cat([site.state.bias_values for site in biased]).to(logits.dtype)


def penalise(logits: torch.Tensor, sites: Sequence[Site]) -> None:
    """Repetition, then frequency and presence; a drafted token counts as output of the positions behind it."""
    counted = [(site, site.state.counts) for site in sites if site.state.counts is not None]
    if not counted:
        return
    occurrences = [counts.of(site.state.tokens) for site, counts in counted]
    output = torch.stack([one.output for one in occurrences]).to(logits.dtype)
    drafted = [(place, token) for place, (site, _) in enumerate(counted) for token in site.prefix]
    if drafted:
        places, tokens = torch.tensor(drafted, device=logits.device).T
        output.index_put_((places, tokens), torch.ones((), dtype=output.dtype, device=output.device), accumulate=True)
    in_output = output > 0
    seen = in_output | torch.stack([one.prompt for one in occurrences])
    params = [site.state.params for site, _ in counted]
    repetition = _column([one.repetition_penalty for one in params], logits)
    rows = _rows([site for site, _ in counted], logits.device)
    scores = logits[rows]
    scores = torch.where(seen, torch.where(scores < 0, scores * repetition, scores / repetition), scores)
    scores -= _column([one.frequency_penalty for one in params], logits) * output
    scores -= _column([one.presence_penalty for one in params], logits) * in_output
    logits[rows] = scores


def ban(logits: torch.Tensor, sites: Sequence[Site]) -> None:
    """Bad words that would be completed, and ends that would come before `min_tokens`."""
    banned = [(site.row, token) for site in sites for token in site.state.banned(site.prefix)]
    if banned:
        rows, tokens = torch.tensor(banned, device=logits.device).T
        logits[rows, tokens] = -math.inf


def restrict(logits: torch.Tensor, sites: Sequence[Site]) -> None:
    """Allowed ids and the grammar."""
    listed = [(site, site.state.forbidden) for site in sites if site.state.forbidden is not None]
    if listed:
        rows = _rows([site for site, _ in listed], logits.device)
        logits[rows] = logits[rows].masked_fill(torch.stack([forbidden for _, forbidden in listed]), -math.inf)
    for state in {id(site.state): site.state for site in sites}.values():
        if state.matcher is not None:
            own = [site for site in sites if site.state is state]
            allowed = torch.from_numpy(state.matcher.masks([site.prefix for site in own])).to(logits.device)
            rows = _rows(own, logits.device)
            logits[rows] = logits[rows].masked_fill(~allowed, -math.inf)


def _rows(sites: Sequence[Site], device: torch.device) -> torch.Tensor:
    return torch.tensor([site.row for site in sites], device=device)


def _column(values: Sequence[float], like: torch.Tensor) -> torch.Tensor:
    return torch.tensor(values, dtype=like.dtype, device=like.device)[:, None]
