"""The audit of the kernels: exact enumeration in float64, joint tests over whole generations, controls that must be caught."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable

import torch

from draftsmith.kernels.randomness import Purpose, sample
from draftsmith.kernels.statistics import Fit, g_test
from draftsmith.kernels.verify import Verdict, accepts, residual_logits, verify_chain
from draftsmith.progress import Progress
from draftsmith.serve.audit_config import AuditConfig
from draftsmith.serve.audit_process import START, Law, MarkovPair, Procedure, cells, generate, joint_law
from draftsmith.serve.audit_report import Check, Report, fit_check

VOCAB_SIZE, LENGTH, DEPTH = 5, 4, 3
BATCH = 50_000  # sequences generated at a time
EXACT_ERROR = 1e-12

LAWS = (
    Law(name="temperature 1"),
    Law(name="temperature 0.7, top-k 3", temperature=0.7, top_k=3),
    Law(name="top-p 0.8", top_p=0.8),
    Law(name="temperature 1.3, min-p 0.1", temperature=1.3, min_p=0.1),
    Law(name="draft at temperature 0.5", draft_temperature=0.5),
    Law(name="greedy draft, one-hot law told", draft_temperature=0.0),
    Law(name="deterministic draft, no law told", deterministic=True),
)


def audit_kernels(config: AuditConfig) -> Report:
    device = torch.device(config.device)
    procedures = controls()
    alarm = config.false_alarm / len(LAWS)
    progress = Progress("audit", total=len(LAWS) + len(procedures) + 1, unit="tests")
    checks = exact_checks(config.seed)
    for done, law in enumerate(LAWS):
        progress.update(done, note=law.name)
        fit = joint_fit(law, Procedure(), config, device=device)
        checks.append(fit_check(f"joint law, {law.name}", "law", fit, alarm))
    for done, (name, procedure) in enumerate(procedures.items(), start=len(LAWS)):
        progress.update(done, note=name)
        # Logits of real models lie tens away from 0, where bfloat16 keeps one binary digit after the point.
        fit = joint_fit(LAWS[0], procedure, config, device=device, offset=24.0)
        checks.append(fit_check(f"control: {name}", "control", fit, alarm))
    progress.close()
    note = f"{config.rounds} rounds a law, {LENGTH} tokens of vocabulary {VOCAB_SIZE}, 0 to {DEPTH} drafted tokens a round"
    return Report(f"kernels ({config.impl}, {device})", config.false_alarm, checks, [note])


def joint_fit(law: Law, procedure: Procedure, config: AuditConfig, *, device: torch.device, offset: float = 0.0) -> Fit:
    """G-test of the joint law of the first `LENGTH` tokens, over at least `config.rounds` rounds."""
    pair = law.pair(vocab_size=VOCAB_SIZE, seed=config.seed + 1, device=device, offset=offset)
    counts = torch.zeros(VOCAB_SIZE**LENGTH, dtype=torch.int64, device=device)
    num_rounds = num_sequences = 0
    while num_rounds < config.rounds:
        seeds = torch.arange(num_sequences, num_sequences + min(BATCH, config.rounds), device=device) + config.seed * 2**40
        batch = generate(pair, law, procedure, seeds=seeds, length=LENGTH, depth=DEPTH, impl=config.impl)
        counts += torch.bincount(cells(batch.tokens, VOCAB_SIZE), minlength=len(counts))
        num_rounds, num_sequences = num_rounds + batch.num_rounds, num_sequences + len(seeds)
    return g_test(counts, joint_law(pair.p_logits, LENGTH))


def controls() -> dict[str, Procedure]:
    """Mistakes that engines have shipped, each of which a joint test must see."""
    return {
        "q told at another temperature": Procedure(told=lambda q_logits: q_logits / 1.3),
        "draft and residual share a stream": Procedure(draft_purpose=Purpose.RESIDUAL),
        "q told in bfloat16": Procedure(told=lambda q_logits: q_logits.bfloat16().float()),
        "residual dropped": Procedure(verify=_without_residual),
        "bonus off by one": Procedure(verify=_bonus_off_by_one),
        "truncation that looks at the drafted token": Procedure(truncate=_keep_likely_drafts),
    }


def _last_rows(lengths: torch.Tensor) -> torch.Tensor:
    return torch.cumsum(lengths + 1, 0) - 1


def _without_residual(
    p_logits: torch.Tensor,
    drafts: torch.Tensor,
    lengths: torch.Tensor,
    q_logits: torch.Tensor | None,
    seeds: torch.Tensor,
    positions: torch.Tensor,
    *,
    impl: str,
) -> Verdict:
    """Emits a draw from p where it should come from max(p - q, 0)."""
    verdict = verify_chain(p_logits, drafts, lengths, q_logits, seeds, positions, impl=impl)
    rows = _last_rows(lengths) - lengths + verdict.accepted
    drawn = sample(p_logits[rows], seeds, positions + verdict.accepted, Purpose.BONUS)
    return Verdict(verdict.accepted, verdict.tokens.scatter(1, verdict.accepted[:, None], drawn[:, None]))


def _bonus_off_by_one(
    p_logits: torch.Tensor,
    drafts: torch.Tensor,
    lengths: torch.Tensor,
    q_logits: torch.Tensor | None,
    seeds: torch.Tensor,
    positions: torch.Tensor,
    *,
    impl: str,
) -> Verdict:
    """Draws the bonus from the law of the position before it."""
    last = _last_rows(lengths)
    shifted = p_logits.clone()
    shifted[last] = p_logits[torch.where(lengths > 0, last - 1, last)]
    return verify_chain(shifted, drafts, lengths, q_logits, seeds, positions, impl=impl)


def _keep_likely_drafts(lengths: torch.Tensor, drafts: torch.Tensor, q_logits: torch.Tensor) -> torch.Tensor:
    """Withdraws the drafted tokens from the first unlikely one on: a confidence threshold applied after the draw."""
    chosen = q_logits.softmax(dim=-1).gather(-1, drafts[..., None])[..., 0]
    return torch.minimum(lengths, (chosen > 0.3).long().cumprod(dim=1).sum(dim=1))


Residual = Callable[[torch.Tensor, torch.Tensor], torch.Tensor]


def exact_checks(seed: int) -> list[Check]:
    """Enumeration of one round's output law with the kernels' own accept test and residual, in float64."""
    laws = (Law(name="true q"), Law(name="filtered", temperature=0.8, top_k=3), Law(name="deterministic", deterministic=True))
    checks = []
    for law in laws:
        pair = law.pair(vocab_size=4, seed=seed, device=torch.device("cpu"))
        error = enumeration_error(pair, depth=3, deterministic=law.deterministic)
        said = f"largest error of a probability {error:.1e}"
        checks.append(
            Check(name=f"enumeration, {law.name}", kind="law", passed=error < EXACT_ERROR, said=said, evidence={"error": error})
        )
    broken = enumeration_error(pair, depth=3, residual=lambda p_logits, q_logits: p_logits)
    said = f"largest error of a probability {broken:.1e}"
    checks.append(
        Check(
            name="control: enumeration without residual",
            kind="control",
            passed=broken > EXACT_ERROR,
            said=said,
            evidence={"error": broken},
        )
    )
    nothing = torch.tensor([-math.inf], dtype=torch.float64)
    zero = torch.zeros(1, dtype=torch.float64)
    held = not bool(accepts(nothing, nothing, zero) | accepts(zero - 1, nothing, zero) | accepts(zero - 1, zero, nothing))
    checks.append(Check(name="u = 0, p(x) = 0, q(x) = 0 keep nothing", kind="law", passed=held, said="by the accept test"))
    return checks


def enumeration_error(
    pair: MarkovPair, *, depth: int, deterministic: bool = False, residual: Residual = residual_logits
) -> float:
    """Largest difference between the law of `depth + 1` tokens by one round, filled up by the target, and the target's."""
    size = pair.vocab_size
    p_logits, q_logits = pair.p_logits.double(), pair.q_logits.double()
    if deterministic:
        likeliest = q_logits.argmax(dim=-1, keepdim=True)
        q_logits = torch.full_like(q_logits, -math.inf).scatter_(-1, likeliest, 0.0)
    p, q = p_logits.softmax(-1), q_logits.softmax(-1)
    accept = accept_probability(p_logits.log_softmax(-1), q_logits.log_softmax(-1))
    rest = residual(p_logits, q_logits).softmax(-1)
    # tails[n][c] is the target's law of the n tokens after context c, flattened.
    contexts = torch.arange(size * size)
    following = contexts[:, None] % size * size + torch.arange(size)
    tails = [torch.ones(size * size, 1, dtype=torch.float64)]
    for _ in range(depth + 1):
        tails.append((p[:, :, None] * tails[-1][following]).flatten(1))
    law = torch.zeros((size,) * (depth + 1), dtype=torch.float64)
    for kept in range(depth + 1):
        for prefix in itertools.product(range(size), repeat=kept):
            reach, context = 1.0, START
            for token in prefix:
                reach *= float(q[context, token] * accept[context, token])
                context = int(following[context, token])
            if kept == depth:
                law[prefix] += reach * p[context]
                continue
            rejected = reach * float((q[context] * (1 - accept[context])).sum())
            ends = rest[context][:, None] * tails[depth - kept][following[context]]
            law[prefix] += rejected * ends.view(law[prefix].shape)
    return float((law.flatten() - tails[depth + 1][START]).abs().max())


def accept_probability(log_p: torch.Tensor, log_q: torch.Tensor) -> torch.Tensor:
    """The measure of the uniforms that `accepts` keeps, found by bisection on that very function."""
    low, high = torch.zeros_like(log_p), torch.ones_like(log_p)
    for _ in range(200):
        middle = (low + high) / 2
        kept = accepts(middle.log(), log_p, log_q)
        low, high = torch.where(kept, middle, low), torch.where(kept, high, middle)
    return high
