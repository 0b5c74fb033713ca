"""Repetition, frequency and presence penalties of many rows at once, over the tokens that occur before each and no others."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import NamedTuple

import torch

from draftsmith.serve.sampling.sampling_counts import TokenCounts
from draftsmith.serve.sampling.state import Site


class _Seen(NamedTuple):
    """M pairs of a site and a token that occurs before it."""

    sites: torch.Tensor  # [M] int64, which of the sites
    ids: torch.Tensor  # [M] int64
    output: torch.Tensor  # [M] float32: how often in the output, drafted tokens included
    prompt: torch.Tensor  # [M] bool: whether in the prompt


def penalise(logits: torch.Tensor, sites: Sequence[Site]) -> None:
    """transformers' repetition penalty, then OpenAI's frequency and presence, on `logits` [R, V] in place."""
    counted = [(site, counts) for site in sites if (counts := site.state.counts) is not None]
    if not counted:
        return
    seen = _seen(counted)
    rows = torch.tensor([site.row for site, _ in counted], device=logits.device)[seen.sites]
    params = [site.state.params for site, _ in counted]
    values = [(one.repetition_penalty, one.frequency_penalty, one.presence_penalty) for one in params]
    repetition, frequency, presence = torch.tensor(values, dtype=logits.dtype, device=logits.device)[seen.sites].T
    output = seen.output.to(logits.dtype)
    in_output = output > 0
    scores = logits[rows, seen.ids]
    repeated = torch.where(scores < 0, scores * repetition, scores / repetition)
    scores = torch.where(in_output | seen.prompt, repeated, scores)
    logits[rows, seen.ids] = scores - frequency * output - presence * in_output


def _seen(counted: Sequence[tuple[Site, TokenCounts]]) -> _Seen:
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
    owners = torch.repeat_interleave(torch.arange(len(sizes), device=device), sizes, output_size=num_pairs)
    more = torch.tensor([*fresh], dtype=torch.int64, device=device).reshape(-1, 2)
    times = torch.tensor([*fresh.values()], dtype=torch.float32, device=device)
    seen = _Seen(
        torch.cat([owners, more[:, 0]]),
        torch.cat([*(counts.ids for _, counts in counted), more[:, 1]]),
        torch.cat([*(counts.output for _, counts in counted), times]),
        torch.cat([*(counts.prompt for _, counts in counted), torch.zeros_like(times, dtype=torch.bool)]),
    )
    if again:
        at = torch.tensor(again, device=device)
        seen.output.index_add_(0, at, torch.ones_like(at, dtype=seen.output.dtype))
    return seen
