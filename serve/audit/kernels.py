"""`draftsmith audit --kernels`: each kernel of verification on this machine decides as the shipped
reference in float64, whose every outcome in a small world the tests hold to its probability.
Legend: B rounds, V vocabulary.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace
from typing import Any, NamedTuple

import torch

from draftsmith.kernels.dispatch import choose, reads_freely
from draftsmith.kernels.verify.block import verify_block
from draftsmith.kernels.verify.chain import verify_chain
from draftsmith.kernels.verify.tree import verify_tree
from draftsmith.kernels.verify.verdict import DraftTree, TreeVerdict, Verdict
from draftsmith.serve.audit.config import AuditConfig
from draftsmith.serve.audit.report import Check, Report

VOCAB_SIZE, DEPTH = 5, 3
PARENTS = (-1, -1, 0, 0, 1)  # of a tree's nodes: two children, of which the first has two
# Rounds that the kernel and the reference both decide. A round counts where logits a little larger
# or smaller change nothing: there no draw lies within rounding of its threshold.
INTERPRETED_ROUNDS, COMPILED_ROUNDS = 40, 20_000
NUDGE, LEAST_CLEAR = 1e-5, 0.9
OUTSIDE = (
    "outside this audit: the engine around the kernels and vocabularies of more than a few tokens; "
    "`draftsmith audit --url` holds a running server to its target"
)


class Case(NamedTuple):
    """Processed logits [V] of the target and the draft; no draft's: its tokens are fixed ones."""

    name: str
    p_logits: torch.Tensor
    q_logits: torch.Tensor | None


Arguments = dict[str, Any]  # of a kernel, by name


class Kernel(NamedTuple):
    """A kernel and the drafts that it is given."""

    name: str
    arguments: Callable[[Case, torch.Tensor, torch.Generator], Arguments]
    verify: Callable[..., Verdict | TreeVerdict]
    needs_q: bool = False


def cases(device: torch.device) -> list[Case]:
    generator = torch.Generator().manual_seed(1)
    p_logits, noise = 1.5 * torch.randn(2, VOCAB_SIZE, generator=generator)
    q_logits = 0.7 * p_logits + noise
    narrow = p_logits.masked_fill(p_logits < p_logits.topk(3).values[-1], -math.inf)
    found = [
        Case("true q", p_logits, q_logits),
        Case("filtered target", narrow, q_logits),
        Case("deterministic draft", p_logits, None),
    ]
    return [Case(name, p.to(device), None if q is None else q.to(device)) for name, p, q in found]


def chain_arguments(case: Case, seeds: torch.Tensor, draws: torch.Generator) -> Arguments:
    """Rounds of 0 to `DEPTH` drafted tokens."""
    lengths = seeds % (DEPTH + 1)
    p_logits = case.p_logits.expand(int((lengths + 1).sum()), -1).contiguous()
    q_logits = case.q_logits
    if q_logits is not None:
        q_logits = q_logits.expand(len(seeds), DEPTH, -1).contiguous()
    drafts = torch.cat([drafted(case, len(seeds), 1, draws) for _ in range(DEPTH)], dim=1)
    return {"p_logits": p_logits, "draft_tokens": drafts, "lengths": lengths, "q_logits": q_logits,
            "seeds": seeds, "positions": torch.zeros_like(seeds)}  # fmt: skip


def tree_arguments(case: Case, seeds: torch.Tensor, draws: torch.Generator) -> Arguments:
    """Rounds of the first 0 to all nodes of a tree."""
    lengths = seeds % (len(PARENTS) + 1)
    parents = torch.tensor(PARENTS, device=seeds.device).expand(len(seeds), -1)
    tokens = torch.zeros_like(parents)
    for parent in set(PARENTS):
        children = [node for node, own in enumerate(PARENTS) if own == parent]
        tokens[:, children] = drafted(case, len(seeds), len(children), draws)
    p_logits = case.p_logits.expand(int((lengths + 1).sum()), -1).contiguous()
    q_logits, q_rows = None, None
    if case.q_logits is not None:
        q_logits = case.q_logits[None].contiguous()
        q_rows = torch.zeros_like(parents[:, :1]).expand(-1, len(PARENTS) + 1).contiguous()
    tree = DraftTree(tokens, parents, lengths)
    return {"p_logits": p_logits, "tree": tree, "q_logits": q_logits, "q_rows": q_rows,
            "seeds": seeds, "positions": torch.zeros_like(seeds)}  # fmt: skip


def drafted(case: Case, rounds: int, count: int, draws: torch.Generator) -> torch.Tensor:
    """[B, count] drawn without replacement, or the target's likeliest ones."""
    if case.q_logits is None:
        return case.p_logits.topk(count).indices.expand(rounds, -1)
    return case.q_logits.softmax(-1).expand(rounds, -1).multinomial(count, generator=draws)


KERNELS = (
    Kernel("chain", chain_arguments, verify_chain),
    Kernel("block", chain_arguments, verify_block, needs_q=True),
    Kernel("tree", tree_arguments, verify_tree),
)


def audit_kernels(config: AuditConfig) -> Report:
    device = torch.device(config.device)
    # Raises where it cannot run, before anything takes time.
    impl = choose(config.impl, device, torch.float32)
    checks = [
        reference_check(kernel, case, impl, config.seed)
        for kernel in KERNELS
        for case in cases(device)
        if case.q_logits is not None or not kernel.needs_q
    ]
    for kernel in KERNELS:
        found = reference_check(kernel, cases(device)[0], impl, config.seed, warmth=0.5)
        name = f"control: {kernel.name}, q reported at another temperature"
        checks.append(replace(found, name=name, kind="control", passed=not found.passed))
    return Report(
        f"kernels ({impl}, {device})", config.false_alarm, checks, [note(impl, device), OUTSIDE]
    )


def note(impl: str, device: torch.device) -> str:
    if impl == "torch":
        return (
            "the torch kernels were audited, which a server on this device runs; the Triton "
            "kernels, which one on CUDA runs, were not: audit with --device cuda there, or with "
            "--impl triton and TRITON_INTERPRET=1 in the environment here"
        )
    ran = "ran interpreted; compiled they are audited with --device cuda"
    return f"the Triton kernels {ran if reads_freely(device) else 'were audited'}"


def reference_check(
    kernel: Kernel, case: Case, impl: str, seed: int = 0, *, warmth: float = 1.0
) -> Check:
    """The kernel's decisions beside those of the reference in float64; `warmth` times the draft's
    logits are what the kernel reads."""
    device = case.p_logits.device
    is_interpreted = impl == "triton" and reads_freely(device)
    rounds = INTERPRETED_ROUNDS if is_interpreted else COMPILED_ROUNDS
    seeds = torch.arange(rounds, device=device) + seed * 2**40
    given = kernel.arguments(case, seeds, torch.Generator(device).manual_seed(seed))
    p_logits, q_logits = given["p_logits"], given["q_logits"]

    def decided(impl: str, dtype: torch.dtype, p: float = 1.0, q: float = 1.0) -> torch.Tensor:
        logits = {
            "p_logits": (p_logits * p).to(dtype),
            "q_logits": None if q_logits is None else (q_logits * q).to(dtype),
        }
        verdict = kernel.verify(**given | logits, impl=impl)
        return torch.cat([part.view(rounds, -1) for part in verdict], dim=1)

    reference = decided("torch", torch.float64)
    clear = torch.ones(rounds, dtype=torch.bool, device=device)
    for factor in (1 - NUDGE, 1 + NUDGE):
        clear &= (decided("torch", torch.float64, factor, factor) == reference).all(dim=1)
    ours = decided(impl, torch.float32, q=warmth)
    differing, compared = int((ours != reference).any(dim=1)[clear].sum()), int(clear.sum())
    return Check(
        name=f"{kernel.name} decides as the reference, {case.name}",
        kind="check",
        passed=differing == 0 and compared >= LEAST_CLEAR * rounds,
        said=(
            f"{differing} of {compared} rounds decided otherwise; {rounds - compared} within "
            "rounding of a threshold left out"
        ),
        evidence={"rounds": rounds, "compared": compared, "differing": differing},
    )
