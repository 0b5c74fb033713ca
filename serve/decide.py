"""From target logits to emitted tokens: the request's law, then verification of what was drafted."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from draftsmith.kernels.filters import SamplingRows, process
from draftsmith.kernels.verify import verify_chain
from draftsmith.serve.drafting import Drafts
from draftsmith.serve.scheduler import Row


class Streams:
    """Sampling law and random stream of every deciding row, as the tensors both the drafter and verification read."""

    def __init__(self, rows: Sequence[Row], device: torch.device):
        params = [row.request.params for row in rows]
        self.laws = SamplingRows.of(
            [p.temperature for p in params],
            top_k=[p.top_k for p in params],
            top_p=[p.top_p for p in params],
            min_p=[p.min_p for p in params],
            device=device,
        )
        self.seeds = torch.tensor([row.request.seed for row in rows], dtype=torch.int64, device=device)
        self.positions = torch.tensor([row.request.num_tokens for row in rows], dtype=torch.int64, device=device)

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
    counts = [len(chain) + 1 for chain in chains]
    laws = streams.laws
    if max(counts) > 1:
        laws = laws.repeat(torch.tensor(counts, device=logits.device))
    p_logits = process(logits, laws)
    emitted: list[list[int]] = []
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
        seeds, positions = streams.seeds[num_drafting:], streams.positions[num_drafting:]
        nothing = torch.empty(len(seeds), 0, dtype=torch.int64, device=logits.device)
        lengths = torch.zeros_like(seeds)
        emitted += verify_chain(p_logits[num_rows:], nothing, lengths, None, seeds, positions).tokens.tolist()
    return emitted
