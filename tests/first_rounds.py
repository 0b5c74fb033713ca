"""A propose call, most often for requests of which a drafter has read nothing yet."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from draftsmith.drafters.interface import DraftInputs, ServingDrafter
from draftsmith.drafters.target.target import Target
from draftsmith.kernels.sampling.filters import SamplingRows

BLOCKS = 8  # of four tokens, for each row


def text_round(texts: Sequence[list[int]], num_draft: Sequence[int], **changes: Any) -> DraftInputs:
    """For a drafter that reads histories alone."""
    none = torch.zeros(len(texts), dtype=torch.int64)
    values = {
        "tokens": none,
        "starts": none,
        "lengths": none + 1,
        "taps": None,
        "num_draft": torch.tensor(num_draft),
        "sampling": SamplingRows.of([1.0] * len(texts)),
        "seeds": torch.arange(len(texts)),
        "pool": None,
        "block_tables": none[:, None],
        "histories": texts,
    }
    return DraftInputs(**{**values, **changes})


def first_round(
    drafter: ServingDrafter,
    target: Target,
    texts: Sequence[list[int]],
    num_draft: Sequence[int],
    starts: Sequence[int] | None = None,
    **changes: Any,
) -> DraftInputs:
    """Rows are drawn at temperature 1, each by its number; the drafter's caches hold the first
    `starts` tokens of each."""
    rows, states = len(texts), {}
    starts = starts or [0] * rows
    if drafter.taps:
        for text in {*map(tuple, texts)}:
            ids = torch.tensor([text])
            states[text] = target.states(ids, torch.ones_like(ids), drafter.taps)[0][0, :-1]
    values = {
        "tokens": torch.tensor([token for text, at in zip(texts, starts) for token in text[at:]]),
        "starts": torch.tensor(starts),
        "lengths": torch.tensor([len(text) - at for text, at in zip(texts, starts)]),
        "taps": torch.cat([states[tuple(text)][at:] for text, at in zip(texts, starts)])
        if states
        else None,
        "pool": drafter.new_pool(BLOCKS * rows, 4, torch.device("cpu"), target.dtype),
        "block_tables": torch.arange(BLOCKS * rows).view(rows, BLOCKS),
    }
    return text_round(texts, num_draft, **{**values, **changes})
