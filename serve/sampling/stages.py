"""Biases, bans and masks, as transformers' processors apply them. Each changes its sites' rows of `logits` [R, V] in place."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch

from draftsmith.serve.sampling.grammar_matcher import GrammarMatcher
from draftsmith.serve.sampling.state import Site


def add_biases(logits: torch.Tensor, sites: Sequence[Site]) -> None:
    biased = [site for site in sites if len(site.state.bias_ids)]
    if biased:
        counts = torch.tensor([len(site.state.bias_ids) for site in biased], device=logits.device)
        rows = torch.repeat_interleave(_rows(biased, logits.device), counts)
        ids = torch.cat([site.state.bias_ids for site in biased])
        logits[rows, ids] += torch.cat([site.state.bias_values for site in biased]).to(logits.dtype)


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
            rows = _rows(own, logits.device)
            logits[rows] = logits[rows].masked_fill(~_allowed(state.matcher, own, logits.shape[-1]).to(logits.device), -math.inf)


def _allowed(matcher: GrammarMatcher, sites: Sequence[Site], vocab_size: int) -> torch.Tensor:
    """What the grammar of one request allows at its sites: [n, V] bool.

    Where it fails the sites are asked one by one, and those where it fails again allow nothing: behind drafted tokens that
    says nothing about the sites before them.
    """
    try:
        return torch.from_numpy(matcher.masks([site.prefix for site in sites]))
    except Exception:
        masks = torch.zeros(len(sites), vocab_size, dtype=torch.bool)
        for mask, site in zip(masks, sites):
            with site.state.owning("the grammar", site.prefix):
                mask.copy_(torch.from_numpy(matcher.masks([site.prefix])[0]))
        return masks


def _rows(sites: Sequence[Site], device: torch.device) -> torch.Tensor:
    return torch.tensor([site.row for site in sites], device=device)
