"""Negative controls of the kernel audit: mistakes that engines have shipped or could, each of which
a joint test must detect. And the cases that must hold."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, replace

import torch

from draftsmith.kernels.sampling.random_streams import Purpose, sample, uniform
from draftsmith.kernels.verify.block import verify_block
from draftsmith.kernels.verify.chain import verify_chain
from draftsmith.kernels.verify.draft_tree import DraftTree
from draftsmith.kernels.verify.residual import log_distribution, residual_distribution
from draftsmith.kernels.verify.verdict import TreeVerdict, Verdict
from draftsmith.serve.sampling.params import SamplingParams
from tests.kernel_audit.plain_verify import Left, Rules, verify_chain_by, verify_tree_by
from tests.kernel_audit.process import Chains, Procedure, Trees
from tests.kernel_audit.world import VERSIONS, Distribution

PENALTIES = SamplingParams(
    frequency_penalty=0.9, presence_penalty=0.4, repetition_penalty=1.3, logit_bias=((1, 0.5),)
)
PLAIN = Distribution(name="temperature 1")
PENALISED = Distribution(name="penalties and a bias", penalties=PENALTIES)
UNFILTERED_DRAFT = Distribution(
    name="top-k 3, draft without filters", top_k=3, draft_filtered=False
)
DISTRIBUTIONS = (
    PLAIN,
    Distribution(name="temperature 0.7, top-k 3", temperature=0.7, top_k=3),
    Distribution(name="top-p 0.8", top_p=0.8),
    Distribution(name="temperature 1.3, min-p 0.1", temperature=1.3, min_p=0.1),
    UNFILTERED_DRAFT,
    PENALISED,
    Distribution(name="draft at temperature 0.5", draft_temperature=0.5),
    Distribution(name="greedy draft, one-hot distribution reported", draft_temperature=0.0),
    Distribution(name="deterministic draft, no distribution reported", deterministic=True),
)
FEW_DISTRIBUTIONS = (PLAIN, UNFILTERED_DRAFT, PENALISED)


def end_by_guess(
    lengths: torch.Tensor, drafts: torch.Tensor, q_logits: torch.Tensor
) -> torch.Tensor:
    """Rounds end where a guess of survival falls low, made of what is known before each draft is
    drawn: the largest chance in its distribution, known by the drafts before it. (The same of the
    drafted token's own chance is a negative control.)"""
    guesses = q_logits.softmax(dim=-1).amax(dim=-1)  # [B, K]
    return torch.minimum(lengths, (guesses.cumprod(dim=1) > 0.2).long().sum(dim=1))


BLOCKS = Chains(verify=verify_block)
PROCEDURES: dict[str, Procedure] = {
    "chain": Chains(),
    "block": BLOCKS,
    "tree": Trees(),
    "chain, ended by a guess": Chains(truncate=end_by_guess),
    "block, ended by a guess": replace(BLOCKS, truncate=end_by_guess),
}


@dataclass(frozen=True)
class Case:
    way: str
    distribution: Distribution
    procedure: Procedure


def cases() -> list[Case]:
    """Cases: every distribution drafted and verified in every way; a block without distributions is
    a chain and is not repeated. The end of a round does not depend on filters and temperatures, so
    a few distributions are enough for it."""
    ways = [
        (way, distribution, run)
        for way, run in PROCEDURES.items()
        for distribution in (FEW_DISTRIBUTIONS if "ended" in way else DISTRIBUTIONS)
    ]
    return [Case(*way) for way in ways if not (way[0] == "block" and way[1].deterministic)]


HALF_UNIFORMS = 2048  # values of a half-precision uniform


@dataclass(frozen=True)
class Control:
    distribution: Distribution
    procedure: Procedure
    offset: float = 0.0  # of the logits


def controls() -> dict[str, Control]:
    blind = replace(PENALISED, sees_drafts=False)
    # Few likely tokens, and a draft unlike them: here noise that is used twice shows
    # soonest.
    narrow = Distribution(name="", top_p=0.7, likeness=0.4)
    return {
        "q reported at another temperature": Control(
            PLAIN, Chains(reported=lambda q_logits: q_logits / 1.3)
        ),
        # Logits of real models lie tens away from 0 (GPT-2's near -100), where bfloat16 keeps one
        # binary digit after the point.
        "q reported in bfloat16": Control(
            PLAIN, Chains(reported=lambda q_logits: q_logits.bfloat16().float()), offset=-100.0
        ),
        "q reported of the draft before the swap": Control(
            PLAIN, Chains(reported_version=lambda versions: (versions + 1) % VERSIONS)
        ),
        "draft and residual share a stream": Control(
            narrow, Chains(draw=_draw_from_residual_stream, draft_seeds=_own_seeds)
        ),
        "draft and accept share a uniform": Control(
            PLAIN, Chains(draw=_draw_by_accept_uniform, draft_seeds=_own_seeds)
        ),
        "truncation that looks at the drafted token": Control(
            PLAIN, Chains(truncate=_keep_likely_drafts)
        ),
        "residual dropped": Control(PLAIN, Chains(verify=_without_residual)),
        "bonus off by one": Control(PLAIN, Chains(verify=_bonus_off_by_one)),
        "u = 0 keeps a token without mass": Control(
            UNFILTERED_DRAFT,
            Chains(verify=chain_by(Rules(uniform=_half_uniform, accept=accepts_equal))),
        ),
        "penalties without the drafted prefix": Control(blind, Chains()),
        "block, a chain's residual": Control(
            Distribution(name="", top_p=0.8, likeness=0.3),
            replace(BLOCKS, verify=_block_with_chains_residual),
        ),
        "block, next round drafts with noise looked at": Control(
            narrow, Chains(verify=verify_block, draft_seeds=_own_seeds)
        ),
        "tree, siblings without replacement verified as with": Control(
            PLAIN, Trees(verify=tree_by(Rules(reject=keep_q)))
        ),
        "tree, siblings with replacement verified as without": Control(
            PLAIN,
            Trees(draw=_draw_with_replacement, verify=tree_by(Rules(passes_over_repeats=False))),
        ),
        "tree, a repeated sibling has a chance of its own": Control(
            PLAIN,
            Trees(
                draw=_draw_with_replacement, verify=tree_by(Rules(reject=lambda left, tokens: left))
            ),
        ),
    }


def chain_by(rules: Rules) -> Callable[..., Verdict]:
    def verify(*arguments: torch.Tensor, impl: str) -> Verdict:
        return verify_chain_by(rules, *arguments)

    return verify


def tree_by(rules: Rules) -> Callable[..., TreeVerdict]:
    def verify(
        p_logits: torch.Tensor, tree: DraftTree, *arguments: torch.Tensor, impl: str
    ) -> TreeVerdict:
        return verify_tree_by(rules, p_logits, tree, *arguments)

    return verify


def _own_seeds(seeds: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
    """Seeds of the request, the same for every round."""
    return seeds


def _draw_from_residual_stream(
    logits: torch.Tensor, seeds: torch.Tensor, positions: torch.Tensor
) -> torch.Tensor:
    return sample(logits, seeds, positions, Purpose.RESIDUAL)


def _draw_by_accept_uniform(
    logits: torch.Tensor, seeds: torch.Tensor, positions: torch.Tensor
) -> torch.Tensor:
    """Draw by inversion, with the number that the accept test then compares: one random number per
    position."""
    reach = logits.double().softmax(dim=-1).cumsum(dim=-1)
    drawn = (reach < uniform(seeds, positions, Purpose.ACCEPT)[:, None]).sum(dim=-1)
    return drawn.clamp(max=logits.shape[-1] - 1)


def _keep_likely_drafts(
    lengths: torch.Tensor, drafts: torch.Tensor, q_logits: torch.Tensor
) -> torch.Tensor:
    """Withdraws the drafted tokens from the first unlikely one on: a confidence threshold applied
    after the draw."""
    chosen = q_logits.softmax(dim=-1).gather(-1, drafts[..., None])[..., 0]
    return torch.minimum(lengths, (chosen > 0.3).long().cumprod(dim=1).sum(dim=1))


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
    logits = by_target(p_logits, lengths, verdict.accepted)
    return _ended_by(verdict, sample(logits, seeds, positions + verdict.accepted, Purpose.BONUS))


def by_target(
    p_logits: torch.Tensor, lengths: torch.Tensor, accepted: torch.Tensor
) -> torch.Tensor:
    """[B, V], the target's logits behind the kept drafts."""
    return p_logits[_last_rows(lengths) - lengths + accepted]


def residual_logits(p_logits: torch.Tensor, q_logits: torch.Tensor) -> torch.Tensor:
    """The distribution a rejected token is replaced from, of processed logits [N, V]: the residual,
    or p where it has no mass."""
    residual = residual_distribution(log_distribution(p_logits), log_distribution(q_logits))
    return torch.where((residual > -math.inf).any(dim=-1, keepdim=True), residual, p_logits)


def by_chains_residual(
    p_logits: torch.Tensor, lengths: torch.Tensor, q_logits: torch.Tensor, accepted: torch.Tensor
) -> torch.Tensor:
    """[B, V]: max(p - q, 0) behind the kept drafts, where a block has max(r p - q, 0); p behind the
    last draft."""
    logits = by_target(p_logits, lengths, accepted)
    cut = accepted < lengths
    rows = torch.arange(len(lengths), device=lengths.device)[cut]
    logits[cut] = residual_logits(logits[cut], q_logits[rows, accepted[cut]]).to(logits.dtype)
    return logits


def _block_with_chains_residual(
    p_logits: torch.Tensor,
    drafts: torch.Tensor,
    lengths: torch.Tensor,
    q_logits: torch.Tensor,
    seeds: torch.Tensor,
    positions: torch.Tensor,
    *,
    impl: str,
) -> Verdict:
    verdict = verify_block(p_logits, drafts, lengths, q_logits, seeds, positions, impl=impl)
    logits = by_chains_residual(p_logits, lengths, q_logits, verdict.accepted)
    return _ended_by(verdict, sample(logits, seeds, positions + verdict.accepted, Purpose.RESIDUAL))


def _ended_by(verdict: Verdict, tokens: torch.Tensor) -> Verdict:
    return Verdict(
        verdict.accepted, verdict.tokens.scatter(1, verdict.accepted[:, None], tokens[:, None])
    )


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
    """Draws the bonus from the distribution of the position before it."""
    last = _last_rows(lengths)
    shifted = p_logits.clone()
    shifted[last] = p_logits[torch.where(lengths > 0, last - 1, last)]
    return verify_chain(shifted, drafts, lengths, q_logits, seeds, positions, impl=impl)


def _half_uniform(
    seeds: torch.Tensor, positions: torch.Tensor, numbers: torch.Tensor
) -> torch.Tensor:
    """In [0, 1) with 0 among its values, as a half-precision generator gives them."""
    return (
        uniform(seeds, positions, Purpose.ACCEPT, numbers) * HALF_UNIFORMS
    ).floor() / HALF_UNIFORMS


def accepts_equal(log_u: torch.Tensor, log_p: torch.Tensor, log_q: torch.Tensor) -> torch.Tensor:
    return (log_u + log_q <= log_p) & (log_q > -math.inf)


def keep_q(left: Left, tokens: torch.Tensor) -> Left:
    """The next sibling is tested as if it, too, came from the whole of q."""
    return Left(log_distribution(residual_distribution(left.log_p, left.log_q)), left.log_q)


def _draw_with_replacement(
    logits: torch.Tensor, seeds: torch.Tensor, positions: torch.Tensor, count: int
) -> torch.Tensor:
    """Independent draws, each of a stream of its own."""
    draws = [
        sample(logits, seeds + (place << 50), positions, Purpose.DRAFT) for place in range(count)
    ]
    return torch.stack(draws, dim=1)
