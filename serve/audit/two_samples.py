"""Comparison of the sampled text of two servers, for distributions that logprobs do not determine,
such as top-p alone.

The tokens that followed one and the same prefix, with speculation and without, must come from one
distribution, whichever it is. They are grouped by the depth in its round at which each was decided
(`depths.py`). Only prefixes that occur repeatedly count, so flat distributions leave deep tokens
without power.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace

import torch

from draftsmith.kernels.statistics import Fit, chi_square_survival, homogeneity
from draftsmith.serve.audit.client import AuditClient, AuditCounters
from draftsmith.serve.audit.config import AuditConfig
from draftsmith.serve.audit.depths import (
    BONUS,
    UNDRAFTED,
    UNKNOWN,
    Depths,
    depth_shares,
    group_name,
    wanted_depths,
)
from draftsmith.serve.audit.reference import Text
from draftsmith.serve.audit.report import Check, fit_check
from draftsmith.serve.audit.samples import Samples, draw_samples, followers

CONTROL_TEMPERATURE = 1.3
NOTHING_PLANTED = (
    f"no bias is planted at single depths: the control is one sample at {CONTROL_TEMPERATURE} "
    "times the temperature, all depths together, and the bias that each depth detects follows from "
    "its number of samples and the degrees of the test"
)
OTHER_SEEDS = 500_000_009  # the two samples must be independent
ASK = (
    "two samples without known distributions lack power at each depth; give --target, a "
    "--top-k up to 20, or a lower --temperature"
)


def two_sample_checks(
    config: AuditConfig,
    plain: AuditClient,
    contexts: Sequence[Text],
    samples: Sequence[Samples],
    depths: Depths,
    counted: AuditCounters | None,
) -> list[Check]:
    """Checks of each depth; `counted` gives its share where the server reports no rounds."""
    others = replace(config, seed=config.seed + OTHER_SEEDS)
    without = list(draw_samples(plain, others, contexts))
    warmer = replace(
        config,
        seed=config.seed + 2 * OTHER_SEEDS,
        temperature=CONTROL_TEMPERATURE * config.temperature,
    )
    broken = list(draw_samples(plain, warmer, contexts))
    wanted = wanted_depths(config.k) if depths.reported else []
    groups = sorted({UNDRAFTED, *wanted, *depths.flat}, key=lambda depth: (depth == BONUS, depth))
    alarm = config.false_alarm / len(groups)
    checks = []
    for depth in groups:
        fit = same_distribution(samples, without, depths, depth)
        check = fit_check(f"{group_name(depth)}, against plain samples", "check", fit, alarm)
        # A bias at one depth alone is that much smaller among all tokens.
        share = least_share(config, depths, counted) if depth == UNKNOWN else 1.0
        small = check.evidence["detectable_bias"] <= config.bias * share
        blind = check.passed and not small and (depth in wanted or depth == UNKNOWN or check.blind)
        checks.append(replace(check, blind=blind, ask=ASK if blind else ""))
    worst = same_distribution(broken, without)
    return [
        *checks,
        fit_check(f"control: samples {CONTROL_TEMPERATURE} times as warm", "control", worst, alarm),
    ]


def least_share(config: AuditConfig, depths: Depths, counted: AuditCounters | None) -> float:
    """Share of the rarest depth among the tokens after the first; 0 where it is not known."""
    if config.k == 0:
        return 1.0
    if counted is None or not counted.accepted:
        return 0.0
    count = sum(depth == UNKNOWN for depth in depths.flat)
    shares = depth_shares(counted.drafts, counted.accepted, count)
    return min(shares.get(depth, 0.0) for depth in wanted_depths(config.k))


def same_distribution(
    ours: Sequence[Samples], theirs: Sequence[Samples], depths: Depths | None = None, depth: int = 0
) -> Fit:
    """Test of homogeneity of the tokens after each prefix, summed over prefixes; of `ours` only
    tokens at `depth` where `depths` are given."""
    nested = None if depths is None else depths.nested
    first = followers(
        ours,
        None
        if nested is None
        else lambda number, index, length: nested[number][index][length] == depth,
    )
    second = followers(theirs)
    fits = []
    for text in first.keys() & second.keys():
        tokens = sorted(first[text].keys() | second[text].keys())
        counts = [
            torch.tensor([counter[token] for token in tokens])
            for counter in (first[text], second[text])
        ]
        fits.append(homogeneity(*counts))
    # In one order, whatever the order of a set: the sum of floats depends on it.
    statistic, degrees = math.fsum(fit.statistic for fit in fits), sum(fit.degrees for fit in fits)
    num_samples = sum(fit.num_samples for fit in fits if fit.degrees)
    return Fit(statistic, degrees, chi_square_survival(statistic, degrees), num_samples)
