"""`draftsmith audit --kernels`: each kernel of verification on this machine, beside the shipped
reference and by the text that it makes.

The target's distribution is the same behind every text, so that the tokens of a round, those that
it leaves open filled up by the target, must be independent draws from it. Legend: B rounds, V
vocabulary.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch

from draftsmith.kernels.dispatch import choose, reads_freely
from draftsmith.kernels.sampling.random_streams import (
    Purpose,
    round_seeds,
    sample,
    sample_without_replacement,
)
from draftsmith.kernels.statistics import Fit, g_test
from draftsmith.kernels.verify.block import verify_block
from draftsmith.kernels.verify.chain import verify_chain
from draftsmith.kernels.verify.tree import verify_tree
from draftsmith.kernels.verify.verdict import DraftTree, TreeVerdict, Verdict
from draftsmith.progress import Progress
from draftsmith.serve.audit.config import AuditConfig
from draftsmith.serve.audit.report import Check, Report, fit_check

VOCAB_SIZE, DEPTH = 5, 3
BATCH = 50_000  # rounds made at a time
PARENTS = (-1, -1, 0, 0, 1)  # of a tree's nodes: two children, of which the first has two
TREE_DEPTH = 2
# Rounds that the kernel and the reference both decide. A round counts where logits a little larger
# or smaller change nothing: there no draw lies within rounding of its threshold.
INTERPRETED_ROWS, COMPILED_ROWS = 40, 20_000
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


@dataclass(frozen=True)
class Kernel:
    """A kernel, the drafts that it is given, and the number of tokens that a round can keep."""

    name: str
    depth: int
    arguments: Callable[[Case, torch.Tensor], Arguments]
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


def chain_arguments(case: Case, seeds: torch.Tensor) -> Arguments:
    """Rounds of 0 to `DEPTH` drafted tokens."""
    positions = torch.zeros_like(seeds)
    lengths = seeds % (DEPTH + 1)
    if case.q_logits is None:
        drafts, q_logits = torch.full((len(seeds), DEPTH), int(case.p_logits.argmax())), None
        drafts = drafts.to(seeds)
    else:
        rows, own = case.q_logits.expand(len(seeds), -1), round_seeds(seeds, positions)
        drawn = [sample(rows, own, positions + step, Purpose.DRAFT) for step in range(DEPTH)]
        drafts = torch.stack(drawn, dim=1)
        q_logits = case.q_logits.expand(len(seeds), DEPTH, -1).contiguous()
    p_logits = case.p_logits.expand(int((lengths + 1).sum()), -1).contiguous()
    return {"p_logits": p_logits, "draft_tokens": drafts, "lengths": lengths, "q_logits": q_logits,
            "seeds": seeds, "positions": positions}  # fmt: skip


def tree_arguments(case: Case, seeds: torch.Tensor) -> Arguments:
    """Rounds of the first 0 to all nodes of a tree."""
    size, positions = len(seeds), torch.zeros_like(seeds)
    lengths = seeds % (len(PARENTS) + 1)
    tokens = torch.zeros(size, len(PARENTS), dtype=torch.int64, device=seeds.device)
    depths = [0]
    for slot in range(len(PARENTS) + 1):
        if slot:
            depths.append(depths[PARENTS[slot - 1] + 1] + 1)
        children = [node for node, parent in enumerate(PARENTS) if parent + 1 == slot]
        if not children:
            continue
        if case.q_logits is None:
            drawn = case.p_logits.topk(len(children)).indices.expand(size, -1)
        else:
            # Slots of one depth have streams of their own.
            own = round_seeds(seeds, positions) + (slot << 50)
            drawn = sample_without_replacement(
                case.q_logits.expand(size, -1), own, positions + depths[slot], Purpose.DRAFT,
                len(children),
            )  # fmt: skip
        tokens[:, children] = drawn
    parents = torch.tensor(PARENTS, device=seeds.device).expand_as(tokens)
    p_logits = case.p_logits.expand(int((lengths + 1).sum()), -1).contiguous()
    q_logits, q_rows = None, None
    if case.q_logits is not None:
        q_logits = case.q_logits[None].contiguous()
        q_rows = torch.zeros(size, len(PARENTS) + 1, dtype=torch.int64, device=seeds.device)
    tree = DraftTree(tokens, parents, lengths)
    return {"p_logits": p_logits, "tree": tree, "q_logits": q_logits, "q_rows": q_rows,
            "seeds": seeds, "positions": positions}  # fmt: skip


def scaled(
    given: Arguments, p: float = 1.0, q: float = 1.0, dtype: torch.dtype | None = None
) -> Arguments:
    """The same with so many times the logits, in another type."""
    p_logits, q_logits = given["p_logits"] * p, given["q_logits"]
    return given | {
        "p_logits": p_logits.to(dtype),
        "q_logits": None if q_logits is None else (q_logits * q).to(dtype),
    }


KERNELS = (
    Kernel("chain", DEPTH, chain_arguments, verify_chain),
    Kernel("block", DEPTH, chain_arguments, verify_block, needs_q=True),
    Kernel("tree", TREE_DEPTH, tree_arguments, verify_tree),
)


def audit_kernels(config: AuditConfig) -> Report:
    device = torch.device(config.device)
    # Raises where it cannot run, before anything takes time.
    impl = choose(config.impl, device, torch.float32)
    tests = [
        (kernel, case)
        for kernel in KERNELS
        for case in cases(device)
        if case.q_logits is not None or not kernel.needs_q
    ]
    alarm = config.false_alarm / len(tests)
    progress = Progress("audit", total=len(tests) + len(KERNELS), unit="tests")
    checks = []
    for done, (kernel, case) in enumerate(tests, start=1):
        checks.append(reference_check(kernel, case, impl))
        fit = text_fit(kernel, case, config, stream=done)
        checks.append(fit_check(f"{kernel.name}, {case.name}", "check", fit, alarm))
        progress.update(done, note=checks[-1].name)
    for done, kernel in enumerate(KERNELS, start=len(tests) + 1):
        fit = text_fit(kernel, cases(device)[0], config, stream=done, warmth=0.5)
        name = f"control: {kernel.name}, q reported at another temperature"
        checks.append(fit_check(name, "control", fit, alarm))
        progress.update(done, note=name)
    progress.close()
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
    if reads_freely(device):
        return (
            "the Triton kernels ran interpreted and decided single rounds beside the reference, "
            "which made the texts; compiled they are audited with --device cuda"
        )
    return "the Triton kernels decided single rounds beside the reference and made the texts"


def text_fit(
    kernel: Kernel, case: Case, config: AuditConfig, *, stream: int, warmth: float = 1.0
) -> Fit:
    """G-test of all tokens of `config.rounds` rounds together. `warmth` 1 reports the draft's
    logits as they are. Samples of unlike `stream` have no seed in common."""
    device, count = case.p_logits.device, kernel.depth + 1
    # Whole texts by interpreted kernels would take days: the reference makes them there.
    impl = "torch" if reads_freely(device) else config.impl
    p = case.p_logits.double().softmax(dim=-1)
    generator = torch.Generator(device).manual_seed(config.seed + stream)
    powers = VOCAB_SIZE ** torch.arange(count, device=device).flip(0)
    counts = torch.zeros(VOCAB_SIZE**count, dtype=torch.int64, device=device)
    for begin in range(0, config.rounds, BATCH):
        size = min(BATCH, config.rounds - begin)
        seeds = torch.arange(begin, begin + size, device=device)
        given = kernel.arguments(case, seeds + config.seed * 2**40 + stream * 2**32)
        verdict = kernel.verify(**scaled(given, q=warmth), impl=impl)
        filled = torch.multinomial(p, size * count, replacement=True, generator=generator)
        emitted = torch.arange(count, device=device) <= verdict.accepted[:, None]
        tokens = torch.where(emitted, verdict.tokens[:, :count], filled.view(size, count))
        counts += torch.bincount((tokens * powers).sum(dim=1), minlength=len(counts))
    joint = torch.ones(1, dtype=torch.float64, device=device)
    for _ in range(count):
        joint = (joint[:, None] * p).flatten()
    return g_test(counts, joint)


def reference_check(kernel: Kernel, case: Case, impl: str) -> Check:
    """The kernel's decisions beside those of the reference in float64."""
    device = case.p_logits.device
    is_interpreted = impl == "triton" and reads_freely(device)
    rows = INTERPRETED_ROWS if is_interpreted else COMPILED_ROWS
    given = kernel.arguments(case, torch.arange(rows, device=device))

    def decided(impl: str, dtype: torch.dtype, factor: float = 1.0) -> torch.Tensor:
        verdict = kernel.verify(**scaled(given, factor, factor, dtype), impl=impl)
        return torch.cat([part.view(rows, -1) for part in verdict], dim=1)

    reference = decided("torch", torch.float64)
    clear = torch.ones(rows, dtype=torch.bool, device=device)
    for factor in (1 - NUDGE, 1 + NUDGE):
        clear &= (decided("torch", torch.float64, factor) == reference).all(dim=1)
    ours = decided(impl, torch.float32)
    differing, compared = int((ours != reference).any(dim=1)[clear].sum()), int(clear.sum())
    return Check(
        name=f"{kernel.name} decides as the reference, {case.name}",
        kind="check",
        passed=differing == 0 and compared >= LEAST_CLEAR * rows,
        said=(
            f"{differing} of {compared} rounds decided otherwise; {rows - compared} within "
            "rounding of a threshold left out"
        ),
        evidence={"rounds": rows, "compared": compared, "differing": differing},
    )
