"""The audit of the kernels: exact enumeration in float64, joint tests over whole generations, controls that must be caught."""

from __future__ import annotations

import torch

from draftsmith.kernels.statistics import Fit, g_test
from draftsmith.progress import Progress
from draftsmith.serve.audit_cases import PENALTIES, cases
from draftsmith.serve.audit_config import AuditConfig
from draftsmith.serve.audit_controls import controls
from draftsmith.serve.audit_exact import exact_checks
from draftsmith.serve.audit_process import Chains, Procedure, Trees, generate
from draftsmith.serve.audit_report import Check, Report, fit_check
from draftsmith.serve.audit_world import LENGTH, Law, split_error

VOCAB_SIZE = 5
BATCH = 50_000  # sequences generated at a time
WORLD = 1  # seed of the tables: controls must be caught whatever the seed of the draws


def audit_kernels(config: AuditConfig) -> Report:
    device = torch.device(config.device)
    laws, mistakes = cases(), controls()
    alarm = config.false_alarm / len(laws)
    progress = Progress("audit", total=len(laws) + len(mistakes) + 1, unit="tests")
    checks = [*exact_checks(WORLD), prefix_check()]
    for done, case in enumerate(laws, start=1):
        fit = joint_fit(case.law, case.procedure, config, device=device)
        checks.append(fit_check(f"{case.way}, {case.law.name}", "law", fit, alarm))
        progress.update(done, note=checks[-1].name)
    for done, (name, control) in enumerate(mistakes.items(), start=len(laws) + 1):
        fit = joint_fit(control.law, control.procedure, config, device=device, offset=control.offset)
        checks.append(fit_check(f"control: {name}", "control", fit, alarm))
        progress.update(done, note=name)
    progress.close()
    note = (
        f"{config.rounds} rounds a law, {LENGTH} tokens of vocabulary {VOCAB_SIZE}, {Chains().most} drafted tokens at most in a "
        f"chain or block, {Trees().most} nodes in a tree, 0 among them; two drafts that take turns between rounds"
    )
    return Report(f"kernels ({config.impl}, {device})", config.false_alarm, checks, [note])


def prefix_check() -> Check:
    """Penalties behind drafted tokens are those of plain decoding behind the same tokens, whatever of them is committed."""
    error = split_error(PENALTIES, VOCAB_SIZE)
    said = f"largest difference of a logit {error:.1e}, over all texts and all ways to split them"
    return Check(name="penalties count the drafted prefix", kind="law", passed=error < 1e-5, said=said, evidence={"error": error})


def joint_fit(law: Law, procedure: Procedure, config: AuditConfig, *, device: torch.device, offset: float = 0.0) -> Fit:
    """G-test of the joint law of the first `LENGTH` tokens, over at least `config.rounds` rounds."""
    world = law.world(vocab_size=VOCAB_SIZE, seed=WORLD, device=device, offset=offset)
    counts = torch.zeros(VOCAB_SIZE**LENGTH, dtype=torch.int64, device=device)
    num_rounds = num_sequences = 0
    while num_rounds < config.rounds:
        seeds = torch.arange(num_sequences, num_sequences + min(BATCH, config.rounds), device=device) + config.seed * 2**40
        made = generate(world, procedure, seeds=seeds, length=LENGTH, deterministic=law.deterministic, impl=config.impl)
        counts += torch.bincount(made.cells, minlength=len(counts))
        num_rounds, num_sequences = num_rounds + made.num_rounds, num_sequences + len(seeds)
    return g_test(counts, world.joint_law(LENGTH))
