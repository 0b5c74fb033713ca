"""Temperatures that drafts are drawn at. Torch-free.

Verification uses the distribution that a draft was drawn from, so any choice is lossless as long as
it is made before the draw.
"""

from __future__ import annotations

from collections.abc import Sequence

from draftsmith.serve.sampling.params import SamplingParams


def draft_temperatures(params: Sequence[SamplingParams], *, greedy: bool) -> list[float] | None:
    """Temperature of each drafting row; None where all are their requests' own.

    Args:
        greedy: drafts are the draft's likeliest tokens where a request does not name a temperature.
    """
    if not greedy and all(each.draft_temperature is None for each in params):
        return None
    return [
        (0.0 if greedy else each.temperature)
        if each.draft_temperature is None
        else each.draft_temperature
        for each in params
    ]
