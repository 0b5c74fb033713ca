"""Sampled text of two servers held against each other: for laws that logprobs do not tell, such as top-p alone.

The tokens that followed one and the same prefix, with speculation and without, must come from one law, whichever it is.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace

import torch

from draftsmith.kernels.statistics import Fit, chi_square_survival, homogeneity
from draftsmith.serve.audit_client import AuditClient
from draftsmith.serve.audit_config import AuditConfig
from draftsmith.serve.audit_law import Text
from draftsmith.serve.audit_report import Check, fit_check
from draftsmith.serve.audit_samples import CONTROL_TEMPERATURE, Samples, draw_samples, followers

OTHER_SEEDS = 500_000_009  # the two samples must not know of each other


def two_sample_checks(
    config: AuditConfig, plain: AuditClient, contexts: Sequence[Text], samples: Sequence[Samples]
) -> list[Check]:
    others = replace(config, seed=config.seed + OTHER_SEEDS)
    without = list(draw_samples(plain, others, contexts))
    warmer = replace(config, seed=config.seed + 2 * OTHER_SEEDS, temperature=CONTROL_TEMPERATURE * config.temperature)
    broken = list(draw_samples(plain, warmer, contexts))
    alarm = config.false_alarm / config.length
    checks = [
        fit_check(f"token {place + 1} given its prefix, against plain samples", "law", same_law(samples, without, place), alarm)
        for place in range(config.length)
    ]
    worst = min((same_law(broken, without, place) for place in range(config.length)), key=lambda fit: fit.p_value)
    return [*checks, fit_check(f"control: samples {CONTROL_TEMPERATURE} times as warm", "control", worst, alarm)]


def same_law(ours: Sequence[Samples], theirs: Sequence[Samples], place: int) -> Fit:
    """Tests of homogeneity of the tokens at `place`, one for each prefix before it, added up."""
    first, second = followers(ours, place), followers(theirs, place)
    fits = []
    for text in first.keys() & second.keys():
        tokens = sorted(first[text].keys() | second[text].keys())
        counts = [torch.tensor([counter[token] for token in tokens]) for counter in (first[text], second[text])]
        fits.append(homogeneity(*counts))
    # In one order, whatever the order of a set: the sum of floats depends on it.
    statistic, degrees = math.fsum(fit.statistic for fit in fits), sum(fit.degrees for fit in fits)
    num_samples = sum(fit.num_samples for fit in fits if fit.degrees)
    return Fit(statistic, degrees, chi_square_survival(statistic, degrees), num_samples)
