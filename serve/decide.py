"""From target logits to emitted tokens: the request's law, then verification of what was drafted."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cached_property

import torch

from draftsmith.kernels.filters import SamplingRows, process
from draftsmith.kernels.randomness import Purpose, sample
from draftsmith.kernels.verify import verify_chain
from draftsmith.serve.drafting import Drafts
from draftsmith.serve.sampling import Adjustments, chain_prefixes
from draftsmith.serve.scheduler import Row


class Streams:
    """Sampling law and random stream of every deciding row, as the tensors both the drafter and verification read."""

    def __init__(self, rows: Sequence[Row], device: torch.device):
        self.params, self.device = [row.request.params for row in rows], device
        self.all_greedy = all(params.temperature == 0 for params in self.params)
        self.seeds = torch.tensor([row.request.seed for row in rows], dtype=torch.int64, device=device)
        self.positions = torch.tensor([row.request.num_tokens for row in rows], dtype=torch.int64, device=device)
        self.adjust = Adjustments.of([row.request for row in rows])

    @cached_property
    def laws(self) -> SamplingRows:
        # Not made for a greedy round without drafts, which reads none.
        return SamplingRows.of(
            [p.temperature for p in self.params],
            top_k=[p.top_k for p in self.params],
            top_p=[p.top_p for p in self.params],
            min_p=[p.min_p for p in self.params],
            device=self.device,
        )

    def first_laws(self, num_rows: int) -> SamplingRows:
        laws = self.laws
        return SamplingRows(laws.temperature[:num_rows], laws.top_k[:num_rows], laws.top_p[:num_rows], laws.min_p[:num_rows])


def decide(logits: torch.Tensor, chains: Sequence[Sequence[int]], drafts: Drafts | None, streams: Streams) -> list[list[int]]:
    """Each row's accepted drafts, then its residual or bonus token (-1 if its logits are not finite).

    Args:
        logits: [R, V] raw; row b owns `len(chains[b]) + 1` of them.
        chains: the drafted tokens of every deciding row.
        drafts: the proposal of the first rows, None when nothing was drafted.
    """
    if streams.adjust is not None:
        owners, prefixes = chain_prefixes(chains)
        logits = streams.adjust.apply(logits, owners, prefixes)
    if streams.all_greedy and (emitted := _decide_greedily(logits, chains)) is not None:
        return emitted
    counts = [len(chain) + 1 for chain in chains]
    laws = streams.laws
    if max(counts) > 1:
        laws = laws.repeat(torch.tensor(counts, device=logits.device))
    p_logits = process(logits, laws)
    emitted = []
    num_drafting = len(drafts.chains) if drafts is not None else 0
    num_rows = sum(counts[:num_drafting])
    if drafts is not None:
        verdict = verify_chain(
            p_logits[:num_rows],
            drafts.tokens,
            drafts.lengths,
            drafts.logits,
            streams.seeds[:num_drafting],
            streams.positions[:num_drafting],
        )
        emitted += [tokens[: kept + 1] for tokens, kept in zip(verdict.tokens.tolist(), verdict.accepted.tolist())]
    if num_drafting < len(counts):
        # Nothing was drafted for these rows: their token is a bonus token.
        seeds, positions = streams.seeds[num_drafting:], streams.positions[num_drafting:]
        emitted += [[token] for token in sample(p_logits[num_rows:], seeds, positions, Purpose.BONUS).tolist()]
    return emitted


def _decide_greedily(logits: torch.Tensor, chains: Sequence[Sequence[int]]) -> list[list[int]] | None:
    """What verification of one-hot laws comes to: drafts are kept while they are the argmax. None when a logit is NaN.

    The common case on a small machine, and several times cheaper than making the laws.
    """
    best = logits.max(dim=-1)  # the first of equal logits, as `process` takes it
    if not bool(torch.isfinite(best.values).all()):
        return None
    choices: list[int] = best.indices.tolist()
    emitted: list[list[int]] = []
    begin = 0
    for chain in chains:
        kept = 0
        while kept < len(chain) and chain[kept] == choices[begin + kept]:
            kept += 1
        emitted.append(choices[begin : begin + kept + 1])
        begin += len(chain) + 1
    return emitted
