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
    return [draft_temperature(each, greedy=greedy) for each in params]


def draft_temperature(params: SamplingParams, *, greedy: bool) -> float:
    """Temperature of one row; `greedy` as above."""
    if params.draft_temperature is not None:
        return params.draft_temperature
    return 0.0 if greedy else params.temperature


def sampler_name(params: SamplingParams, *, drawn: bool, greedy: bool) -> str:
    """Choice of a row's drafted tokens, as its record names it. `drawn` is False for tokens that
    are not drawn from a distribution."""
    temperature = draft_temperature(params, greedy=greedy) if drawn else 0.0
    if temperature == 0:
        return "greedy"
    return "probabilistic" if temperature == params.temperature else "tempered"
