"""Checks of distributions: the data's tokens under the target's, the draft's against the target's.
B = 1, L tokens, V vocabulary."""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

import torch

from draftsmith.drafters.interface import TrainedDrafter, UnrollBatch, head_of
from draftsmith.drafters.target.target import Target
from draftsmith.kernels.acceptance import overlap
from draftsmith.kernels.sampling.vocabulary import scatter_to_target_vocab
from draftsmith.train.doctor.data_tokens import Row
from draftsmith.train.doctor.finding import Finding, ok, warn

MAX_ROWS, MAX_LENGTH = 32, 1024
FOREIGN_GAP = 0.3  # nats per token
FOREIGN_SIGMAS = 6.0
GREEDY_AGREEMENT = 0.98
USELESS_ALPHA = 0.05


class RowStats(NamedTuple):
    """Statistics of the n tokens of a row that the target wrote, as the mask has it."""

    surprise: torch.Tensor  # [n] -log p(token)
    entropy: torch.Tensor  # [n] what the surprise of a token drawn from p is on average
    greedy: torch.Tensor  # [n] bool, the token is p's likeliest
    outside: torch.Tensor  # [n] p's mass on tokens that the draft cannot draft
    alpha: torch.Tensor  # [m] sum of min(p, q) at the first draft position, m <= n


@torch.no_grad()
def check_distribution(
    rows: list[Row], temperature: float | None, target: Target, draft: TrainedDrafter | None
) -> list[Finding]:
    """`temperature` is that of the data's provenance, None where it has none or filters were on."""
    stats = list(stats_of(rows[:MAX_ROWS], target, draft))
    if not stats:
        return []
    findings = [check_own_text(stats, temperature)] if temperature in (0.0, 1.0) else []
    if draft is None:
        return findings
    alpha = torch.cat([row.alpha for row in stats])
    if draft.vocab_map is not None:
        findings.append(check_outside(torch.cat([row.outside for row in stats])))
    if len(alpha):
        findings.append(check_alpha(float(alpha.mean())))
    return findings


def stats_of(rows: list[Row], target: Target, draft: TrainedDrafter | None) -> Iterator[RowStats]:
    length = min(MAX_LENGTH, target.max_positions)
    for row in rows:
        ids = torch.tensor([row.input_ids[:length]], device=target.device)
        positions = (
            torch.tensor(row.loss_mask[:length], device=target.device)[1:].nonzero()[:, 0] + 1
        )
        if len(positions):
            yield row_stats(ids, positions, target, draft)


def row_stats(
    ids: torch.Tensor, positions: torch.Tensor, target: Target, draft: TrainedDrafter | None
) -> RowStats:
    """`positions` [n] of the tokens that the target wrote."""
    taps, hidden = target.states(ids, torch.ones_like(ids), () if draft is None else draft.taps)
    logits = target.head(hidden[0, positions - 1]).float()
    logprobs = logits.log_softmax(dim=-1)
    tokens = ids[0, positions]
    outside, alpha = torch.zeros(len(tokens)), torch.zeros(0)
    if draft is not None:
        if draft.vocab_map is not None:
            outside = 1 - logprobs[:, draft.vocab_map].exp().sum(dim=-1)
        alpha = first_alpha(ids, positions, logits, taps, draft)
    return RowStats(
        surprise=-logprobs.gather(1, tokens[:, None])[:, 0],
        entropy=-(logprobs.exp() * logprobs.clamp(min=-1e9)).sum(dim=-1),
        greedy=logprobs.argmax(dim=-1) == tokens,
        outside=outside,
        alpha=alpha,
    )


def first_alpha(
    ids: torch.Tensor,
    positions: torch.Tensor,
    logits: torch.Tensor,
    taps: torch.Tensor | None,
    draft: TrainedDrafter,
) -> torch.Tensor:
    """[m] acceptance at temperature 1 of the first drafted token, where the draft has seen enough
    to draft it."""
    step = next(
        iter(
            draft.unroll(
                UnrollBatch(
                    input_ids=ids, attention_mask=torch.ones_like(ids), taps=taps, num_steps=1
                )
            )
        )
    )
    known = positions >= step.offset
    sources = positions[known] - step.offset
    q_logits = (step.hidden[0, sources] @ head_of(step, draft).T).float()
    q_logits = scatter_to_target_vocab(q_logits, draft.vocab_map, logits.shape[-1])
    return overlap(logits[known], q_logits)


def check_own_text(stats: list[RowStats], temperature: float | None) -> Finding:
    """Finds text of another model: a draft trained on it matches a distribution that nothing
    serves."""
    again = "generate the data with this target; a draft trained on foreign text accepts less"
    if temperature == 0.0:
        share = torch.cat([row.greedy for row in stats]).float().mean().item()
        what = f"{share:.1%} of the tokens are the target's greedy choice"
        return (
            ok("data.distribution", what)
            if share >= GREEDY_AGREEMENT
            else warn("data.distribution", what, again)
        )
    surprise, entropy = (
        torch.cat([row.surprise for row in stats]),
        torch.cat([row.entropy for row in stats]),
    )
    gap = (surprise - entropy).double()
    # Surprises of successive samples minus their conditional means are uncorrelated, so the plain
    # standard error holds.
    sigmas = float(gap.mean() / (gap.std(correction=0) / len(gap) ** 0.5).clamp(min=1e-9))
    what = (
        f"{surprise.mean():.2f} nats per token where the target's own samples have "
        f"{entropy.mean():.2f}"
    )
    foreign = gap.mean() > FOREIGN_GAP and sigmas > FOREIGN_SIGMAS
    return warn("data.distribution", what, again) if foreign else ok("data.distribution", what)


def check_outside(outside: torch.Tensor) -> Finding:
    mass = float(outside.mean())
    what = (
        f"{mass:.1%} of the target's mass is outside the draft's vocabulary, so alpha is at most "
        f"{1 - mass:.3f} on this text"
    )
    if mass > 0.1:
        return warn(
            "draft.outside",
            what,
            "train with a larger draft_vocab_size, or one counted on text like this",
        )
    return ok("draft.outside", what)


def check_alpha(alpha: float) -> Finding:
    what = f"alpha_1 is {alpha:.3f} on this text at T=1"
    if alpha < USELESS_ALPHA:
        return warn(
            "draft.alpha", what, "train the draft on this target's answers, or serve without it"
        )
    return ok("draft.alpha", what)
