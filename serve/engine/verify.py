"""From target logits to emitted tokens: the request's distribution, then verification of what was
drafted."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cached_property, partial
from typing import NamedTuple

import torch

from draftsmith.kernels.sampling.filters import SamplingRows, process
from draftsmith.kernels.sampling.random_streams import Purpose, round_seeds, sample
from draftsmith.kernels.verify.block import verify_block
from draftsmith.kernels.verify.chain import verify_chain
from draftsmith.kernels.verify.lossy import verify_synthetic, verify_typical
from draftsmith.kernels.verify.tree import verify_tree
from draftsmith.kernels.verify.verdict import Verdict
from draftsmith.serve.engine.round import Decision, Drafts
from draftsmith.serve.engine.scheduler import Row
from draftsmith.serve.engine.trees import greedy_path
from draftsmith.serve.sampling.adjustments import Adjustments, chain_prefixes, tree_prefixes
from draftsmith.serve.sampling.params import SamplingParams


class ChainRule(NamedTuple):
    """How a chain is judged."""

    verify: Callable[..., Verdict]
    argmax: bool = True  # greedy rows come to keeping drafts while they are the argmax


CHAIN_RULES = {
    "chain": ChainRule(verify_chain),
    "block": ChainRule(verify_block),
    "typical": ChainRule(verify_typical),  # lossy
}


def chain_rule(verification: str, synthetic_acceptance: Sequence[float] | None) -> ChainRule:
    if synthetic_acceptance is None:
        return CHAIN_RULES[verification]
    return ChainRule(partial(verify_synthetic, rates=synthetic_acceptance), argmax=False)


class Streams:
    """Sampling distribution and random stream of every deciding row, as the tensors both the
    drafter and verification read."""

    def __init__(
        self, rows: Sequence[Row], device: torch.device, *, rule: ChainRule = CHAIN_RULES["chain"]
    ):
        self.params, self.device = [row.request.params for row in rows], device
        self.rule = rule
        self.all_greedy = all(params.temperature == 0 for params in self.params)
        self.seeds = torch.tensor(
            [row.request.seed for row in rows], dtype=torch.int64, device=device
        )
        self.positions = torch.tensor(
            [row.request.num_tokens for row in rows], dtype=torch.int64, device=device
        )
        self.adjust = Adjustments.of([row.request for row in rows])

    @cached_property
    def distributions(self) -> SamplingRows:
        # Not made for a greedy round without drafts, which reads none.
        return self._distributions(self.params, [p.temperature for p in self.params])

    def draft_seeds(self, num_rows: int) -> torch.Tensor:
        """[num_rows] int64 of the first rows, which draft; no two rounds of a request have the same
        one."""
        return round_seeds(self.seeds[:num_rows], self.positions[:num_rows])

    def draft_distributions(
        self, num_rows: int, temperatures: Sequence[float] | None = None
    ) -> SamplingRows:
        """Of the first rows, which draft; at their requests' temperatures or the given ones."""
        if temperatures is None and num_rows == len(self.params):
            return self.distributions
        params = self.params[:num_rows]
        return self._distributions(
            params, [p.temperature for p in params] if temperatures is None else temperatures
        )

    def _distributions(
        self, params: Sequence[SamplingParams], temperatures: Sequence[float]
    ) -> SamplingRows:
        return SamplingRows.of(
            temperatures,
            top_k=[p.top_k for p in params],
            top_p=[p.top_p for p in params],
            min_p=[p.min_p for p in params],
            device=self.device,
        )


def decide(
    logits: torch.Tensor, chains: Sequence[Sequence[int]], drafts: Drafts | None, streams: Streams
) -> Decision:
    """What each row emits.

    Args:
        logits: [R, V] raw; row b owns `len(chains[b]) + 1` of them.
        chains: the drafted tokens of every deciding row, in a tree's order where it drafted one.
        drafts: the proposal of the first rows, None when nothing was drafted.
    """
    tree = None if drafts is None else drafts.tree
    parents = None if tree is None else tree.parents + [[]] * (len(chains) - len(tree.parents))
    if streams.adjust is not None:
        owners, prefixes = (
            chain_prefixes(chains) if parents is None else tree_prefixes(chains, parents)
        )
        logits = streams.adjust.apply(logits, owners, prefixes)
    if (
        streams.all_greedy
        and streams.rule.argmax
        and (decision := _decide_greedily(logits, chains, parents)) is not None
    ):
        return decision
    counts = [len(chain) + 1 for chain in chains]
    distributions = streams.distributions
    if max(counts) > 1:
        distributions = distributions.repeat(counts)
    p_logits = process(logits, distributions)
    decision = Decision([], [])
    num_drafting = len(drafts.chains) if drafts is not None else 0
    num_rows = sum(counts[:num_drafting])
    if drafts is not None:
        seeds, positions = streams.seeds[:num_drafting], streams.positions[:num_drafting]
        decision = _verify(p_logits[:num_rows], drafts, seeds, positions, streams.rule)
    if num_drafting < len(counts):
        # Nothing was drafted for these rows: their token is a bonus token.
        seeds, positions = streams.seeds[num_drafting:], streams.positions[num_drafting:]
        bonus = sample(p_logits[num_rows:], seeds, positions, Purpose.BONUS)
        decision.emitted.extend([token] for token in bonus.tolist())
        if tree is not None:
            decision.paths.extend([] for _ in bonus)
    return decision


def _verify(
    p_logits: torch.Tensor,
    drafts: Drafts,
    seeds: torch.Tensor,
    positions: torch.Tensor,
    rule: ChainRule,
) -> Decision:
    if drafts.tree is None:
        verdict = rule.verify(
            p_logits, drafts.tokens, drafts.lengths, drafts.logits, seeds, positions
        )
        parts = [verdict.accepted[:, None], verdict.tokens]
    else:
        grown = verify_tree(
            p_logits, drafts.tree.draft, drafts.logits, drafts.tree.q_rows, seeds, positions
        )
        parts = [grown.accepted[:, None], grown.tokens, grown.nodes]
    width = parts[1].shape[1]
    # The round's one look at what became of it.
    told: list[list[int]] = torch.cat(parts, dim=1).tolist()
    emitted = [row[1 : row[0] + 2] for row in told]
    paths = [] if drafts.tree is None else [row[1 + width : 1 + width + row[0]] for row in told]
    return Decision(emitted, paths)


def _decide_greedily(
    logits: torch.Tensor, chains: Sequence[Sequence[int]], parents: Sequence[Sequence[int]] | None
) -> Decision | None:
    """What verification of one-hot distributions comes to: drafts are kept while they are the
    argmax. None when a logit is NaN.

    The common case on a small machine, and several times cheaper than making the distributions.
    """
    best = logits.max(dim=-1)  # the first of equal logits, as `process` takes it
    choices, finite = torch.stack([best.indices, torch.isfinite(best.values).long()]).tolist()
    if not all(finite):
        return None
    decision = Decision([], [])
    begin = 0
    for row, chain in enumerate(chains):
        own = choices[begin : begin + len(chain) + 1]
        begin += len(own)
        if parents is None:
            kept = 0
            while kept < len(chain) and chain[kept] == own[kept]:
                kept += 1
            decision.emitted.append(own[: kept + 1])
        else:
            path = greedy_path(chain, parents[row], own)
            decision.paths.append(path)
            decision.emitted.append([own[slot] for slot in (0, *(node + 1 for node in path))])
    return decision
