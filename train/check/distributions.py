"""Checks of distributions: the data's tokens under the target's, the draft's against the target's.
B = 1, L tokens, V vocabulary."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch

from draftsmith.drafters.interface import TrainedDrafter, UnrollBatch, head_of
from draftsmith.drafters.target.target import Target
from draftsmith.kernels.acceptance import overlap
from draftsmith.kernels.sampling.vocabulary import scatter_to_target_vocab
from draftsmith.train.check.data import DataSample, Row
from draftsmith.train.check.finding import Finding, ok, warn

MAX_ROWS, MAX_LENGTH = 32, 1024
FOREIGN_GAP = 0.3  # nats per token
FOREIGN_SIGMAS = 6.0
GREEDY_AGREEMENT = 0.98
USELESS_ALPHA = 0.05


class RowStats(NamedTuple):
    """Statistics of the n tokens of a row that the target wrote, as the mask has it."""

    gap: torch.Tensor  # [n] -log p(token), less what that is on average for a token drawn from p
    greedy: torch.Tensor  # [n] bool, the token is p's likeliest
    alpha: torch.Tensor  # [m] sum of min(p, q) at the first draft position, m <= n


@torch.no_grad()
def check_distribution(
    sample: DataSample, target: Target, draft: TrainedDrafter | None
) -> list[Finding]:
    stats = [
        one for row in sample.rows[:MAX_ROWS] if (one := row_stats(row, target, draft)) is not None
    ]
    if not stats:
        return []
    temperature = sampled_at(sample.provenance)
    findings = [check_own_text(stats, temperature)] if temperature in (0.0, 1.0) else []
    alpha = torch.cat([row.alpha for row in stats])
    return [*findings, check_alpha(float(alpha.mean()))] if len(alpha) else findings


def sampled_at(provenance: dict[str, Any]) -> float | None:
    """The temperature, where the text was drawn from one whole distribution; a greedy choice no
    filter changes."""
    temperature = provenance.get("temperature")
    if isinstance(temperature, list):
        return None
    filtered = provenance.get("top_k", 0) != 0 or provenance.get("top_p", 1.0) != 1.0
    return None if filtered and temperature != 0 else temperature


def row_stats(row: Row, target: Target, draft: TrainedDrafter | None) -> RowStats | None:
    length = min(MAX_LENGTH, target.max_positions)
    ids = torch.tensor([row.input_ids[:length]], device=target.device)
    mask = torch.tensor(row.loss_mask[:length], device=target.device)
    positions = mask[1:].nonzero()[:, 0] + 1
    if not len(positions):
        return None
    taps, hidden = target.states(ids, torch.ones_like(ids), () if draft is None else draft.taps)
    logits = target.head(hidden[0, positions - 1]).float()
    logprobs = logits.log_softmax(dim=-1)
    tokens = ids[0, positions]
    entropy = -(logprobs.exp() * logprobs.clamp(min=-1e9)).sum(dim=-1)
    alpha = torch.zeros(0)
    if draft is not None:
        alpha = first_alpha(ids, positions, logits, taps, draft)
    return RowStats(
        gap=-logprobs.gather(1, tokens[:, None])[:, 0] - entropy,
        greedy=logprobs.argmax(dim=-1) == tokens,
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
    batch = UnrollBatch(input_ids=ids, attention_mask=torch.ones_like(ids), taps=taps, num_steps=1)
    step = next(iter(draft.unroll(batch)))
    known = positions >= step.offset
    sources = positions[known] - step.offset
    q_logits = (step.hidden[0, sources] @ head_of(step, draft).T).float()
    q_logits = scatter_to_target_vocab(q_logits, draft.vocab_map, logits.shape[-1])
    return overlap(logits[known], q_logits)


def check_own_text(stats: list[RowStats], temperature: float | None) -> Finding:
    """Finds text of another model: a draft trained on it matches a distribution that nothing
    serves."""
    if temperature == 0.0:
        share = torch.cat([row.greedy for row in stats]).float().mean().item()
        what = f"{share:.1%} of the tokens are the target's greedy choice"
        is_foreign = share < GREEDY_AGREEMENT
    else:
        gap = torch.cat([row.gap for row in stats]).double()
        # Surprises of successive samples minus their conditional means are uncorrelated, so the
        # plain standard error holds.
        sigmas = float(gap.mean() / (gap.std(correction=0) / len(gap) ** 0.5).clamp(min=1e-9))
        what = f"{gap.mean():+.2f} nats per token beside the target's own samples"
        is_foreign = bool(gap.mean() > FOREIGN_GAP) and sigmas > FOREIGN_SIGMAS
    mend = "generate the data with this target; a draft trained on foreign text accepts less"
    return warn("data.distribution", what, mend) if is_foreign else ok("data.distribution", what)


def check_alpha(alpha: float) -> Finding:
    what = f"alpha_1 is {alpha:.3f} on this text at T=1"
    if alpha < USELESS_ALPHA:
        mend = "train the draft on this target's answers, or serve without it"
        return warn("draft.alpha", what, mend)
    return ok("draft.alpha", what)
