"""The audit of the kernels: exact enumeration in float64, joint tests over whole generations,
controls that must be caught."""

from __future__ import annotations

import functools
import itertools
from collections.abc import Mapping, Sequence
from typing import NamedTuple

import torch

from draftsmith.kernels.dispatch import choose
from draftsmith.kernels.statistics import Fit, chi_square, chi_square_survival, g_test
from draftsmith.serve.audit.config import AuditConfig
from draftsmith.serve.audit.report import Check, Report, fit_check
from tests.kernel_audit.controls import PENALTIES, cases, controls
from tests.kernel_audit.exact import DISTRIBUTIONS, exact_checks
from tests.kernel_audit.process import Procedure, generate
from tests.kernel_audit.triton import triton_checks
from tests.kernel_audit.world import LENGTH, Distribution, World, split_error

VOCAB_SIZE = 5
BATCH = 50_000  # sequences generated at a time
# a small bias shows best where few cells share the samples, a high order one in all of them
SUMMED_LENGTHS = (2, 3, LENGTH)
SUMMED_EXPECTED = 25.0  # least expectation of a cell where statistics are summed
# rounds of each distribution and shape that Triton and the reference both decide
INTERPRETED_ROWS, COMPILED_ROWS = 20, 5000
WORLD = 1  # seed of the tables: controls must be caught whatever the seed of the draws


def audit_kernels(config: AuditConfig) -> Report:
    device = torch.device(config.device)
    # raises where it cannot run, before anything takes time
    choose(config.impl, device, torch.float32)
    distributions, mistakes = cases(), controls()
    ways = list(dict.fromkeys(case.way for case in distributions))
    # Half for the cases one by one, half for what they come to together.
    alarm = config.false_alarm / 2 / len(distributions)
    sum_alarm = config.false_alarm / 2 / (len(ways) * len(SUMMED_LENGTHS))
    checks = [*exact_checks(WORLD), *triton_rows(config, device), prefix_check()]
    samples: dict[str, list[Sample]] = {way: [] for way in ways}
    for done, case in enumerate(distributions, start=1):
        sample = joint_sample(case.distribution, case.procedure, config, device=device, stream=done)
        samples[case.way].append(sample)
        checks.append(
            fit_check(f"{case.way}, {case.distribution.name}", "check", sample.fit(), alarm)
        )
    checks += summed_checks(samples, sum_alarm)
    for done, (name, control) in enumerate(mistakes.items(), start=len(distributions) + 1):
        sample = joint_sample(
            control.distribution,
            control.procedure,
            config,
            device=device,
            stream=done,
            offset=control.offset,
        )
        checks.append(fit_check(f"control: {name}", "control", sample.fit(), alarm))
    return Report(f"kernels ({config.impl}, {device})", config.false_alarm, checks)


def summed(fits: Sequence[Fit]) -> Fit:
    """One test of several independent samples, each held against a distribution of its own:
    statistics and degrees add up.

    What is too small to see in any of them shows in the sum. The chi-square distribution of a sum
    of many degrees asks for larger cells than that of one statistic: a cell of n expected counts
    adds 1 / n to Pearson's variance of 2 a cell, and 1 / 6n to the mean of a likelihood ratio. Give
    Pearson's, with cells of `SUMMED_EXPECTED`.
    """
    statistic, degrees = sum(fit.statistic for fit in fits), sum(fit.degrees for fit in fits)
    return Fit(
        statistic,
        degrees,
        chi_square_survival(statistic, degrees),
        sum(fit.num_samples for fit in fits),
    )


def summed_checks(samples: Mapping[str, Sequence[Sample]], alarm: float) -> list[Check]:
    """A check of all cases of each way to verify together, per number of first tokens."""
    checks = []
    for (way, found), length in itertools.product(samples.items(), SUMMED_LENGTHS):
        fit = summed([sample.first_tokens(length) for sample in found])
        name = f"{way}, {len(found)} cases together, first {length} tokens"
        checks.append(fit_check(name, "check", fit, alarm))
    return checks


def triton_rows(config: AuditConfig, device: torch.device) -> list[Check]:
    """Triton's decisions beside the reference's, where Triton is what is audited."""
    if choose(config.impl, device, torch.float32) != "triton":
        return []
    rows = INTERPRETED_ROWS if device.type == "cpu" else COMPILED_ROWS
    return triton_checks(DISTRIBUTIONS, WORLD, rows=rows, device=device)


def sampled_impl(config: AuditConfig, device: torch.device) -> str:
    """Whole texts by interpreted kernels would take days: the reference makes them there."""
    return "torch" if device.type == "cpu" else config.impl


def prefix_check() -> Check:
    """Penalties behind drafted tokens are those of plain decoding behind the same tokens, whatever
    of them is committed."""
    error = split_error(PENALTIES, VOCAB_SIZE)
    said = f"largest difference of a logit {error:.1e}, over all texts and all ways to split them"
    return Check(
        name="penalties count the drafted prefix",
        kind="check",
        passed=error < 1e-5,
        said=said,
        evidence={"error": error},
    )


class Sample(NamedTuple):
    """Whole texts of one case, counted."""

    counts: torch.Tensor  # [V ** LENGTH]
    world: World

    def fit(self) -> Fit:
        """G-test of the joint distribution of all tokens."""
        return g_test(self.counts, self.world.joint_distribution(LENGTH))

    def first_tokens(self, length: int) -> Fit:
        """Pearson's test of the joint distribution of the first tokens, to be `summed`."""
        counts = self.counts.view(VOCAB_SIZE**length, -1).sum(dim=1)
        return chi_square(
            counts, self.world.joint_distribution(length), min_expected=SUMMED_EXPECTED
        )


@functools.lru_cache(maxsize=32)
def world_of(distribution: Distribution, device: torch.device, offset: float) -> World:
    """Tables of a case, which all ways to draft and verify share."""
    return distribution.world(vocab_size=VOCAB_SIZE, seed=WORLD, device=device, offset=offset)


def joint_sample(
    distribution: Distribution,
    procedure: Procedure,
    config: AuditConfig,
    *,
    device: torch.device,
    stream: int = 0,
    offset: float = 0.0,
) -> Sample:
    """The first `LENGTH` tokens of texts, over at least `config.rounds` rounds.

    Samples of unlike `stream` have no seed in common, so that they are independent.
    """
    world = world_of(distribution, device, offset)
    counts = torch.zeros(VOCAB_SIZE**LENGTH, dtype=torch.int64, device=device)
    first_seed = config.seed * 2**40 + stream * 2**32
    impl = sampled_impl(config, device)
    num_rounds = num_sequences = 0
    while num_rounds < config.rounds:
        seeds = (
            torch.arange(num_sequences, num_sequences + min(BATCH, config.rounds), device=device)
            + first_seed
        )
        made = generate(
            world,
            procedure,
            seeds=seeds,
            length=LENGTH,
            deterministic=distribution.deterministic,
            impl=impl,
        )
        counts += torch.bincount(made.cells, minlength=len(counts))
        num_rounds, num_sequences = num_rounds + made.num_rounds, num_sequences + len(seeds)
    return Sample(counts, world)
